"""What a plan says about order, read from the catalog's plans."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.ir.problem import Problem
from overweave.ir.schedule import Compute
from overweave.ir.tile_order import APPLY, COPY, MULTIPLY, PART, TileOrder, TileRow
from overweave.schedules.catalog.catalog import build
from overweave.sim.order import QueueRun, kernel_launches, launch_steps, tile_counts

PROBLEM = Problem(operator="matmul_reduce_scatter", m=1024, n=512, k=128, world_size=2, dtype="bfloat16")


def test_sums_follow_all_tiles_and_tiles_follow_nothing():
    plan = build("matmul_reduce_scatter.scatter", PROBLEM, {})
    queues = tuple(replace(queue, after=("tiles",) * (queue.name == "sums")) for queue in plan.schedule.queues)
    steps = launch_steps(replace(plan, schedule=replace(plan.schedule, queues=queues)))
    computes = {
        rank: [
            position for position, step in enumerate(steps) if step.kind == "compute" and step.operation.rank == rank
        ]
        for rank in (0, 1)
    }
    for step in steps:
        if step.kind == "reduce":
            assert set(step.done) >= set(computes[step.operation.rank])
        if step.kind == "compute":
            assert step.done == step.started == ()


def test_a_complete_queue_is_a_chain():
    plan = build("matmul_reduce_scatter.per_shard", PROBLEM, {})
    last: dict[tuple[int, str], int] = {}
    for position, step in enumerate(launch_steps(plan)):
        key = step.operation.rank, step.operation.queue
        assert step.done == ((last[key],) if key in last else ())
        last[key] = position


def test_one_launch_per_rank_and_kernel_queue_holds_every_tile():
    plan = build("matmul_reduce_scatter.scatter", PROBLEM, {})
    steps = launch_steps(plan)
    launches = kernel_launches(plan, steps)
    assert len(launches) == 4
    counts = tile_counts(launches)
    for position, step in enumerate(steps):
        if isinstance(step.operation, Compute):
            assert counts[position] == step.operation.tiles


def row(kind: int, operation: int, **fields: int) -> TileRow:
    return TileRow(kind, 0, 16, 0, 0, 0, 0, 0, 0, -1, operation)._replace(**fields)


@pytest.mark.parametrize(
    ("rows", "runs"),
    [
        ((row(MULTIPLY, 0), row(MULTIPLY, 0, row=16), row(MULTIPLY, 0, width=8)), ((0, 2, 0), (0, 1, 8))),
        ((row(MULTIPLY, 0), row(MULTIPLY, 1), row(MULTIPLY, 0)), ((0, 1, 0), (1, 1, 0), (0, 1, 0))),
        ((row(APPLY, 0), row(APPLY, 0, col=1, width=1), row(COPY, 1)), ((0, 1, 0), (1, 1, 0), (0, 1, 0))),
        ((row(APPLY, 0), row(APPLY, 0, width=1), row(PART, 0)), ((0, 2, 0),)),
    ],
    ids=["narrow", "by turns", "slices where they are claimed", "whole, whatever they claim"],
)
def test_neighbours_of_a_table_that_are_alike_are_one_run(
    rows: tuple[TileRow, ...], runs: tuple[tuple[int, int, int], ...]
):
    plan = build("matmul_reduce_scatter.scatter", PROBLEM, {"pieces": 2})
    queue = next(order.queue for order in plan.tile_orders if order.rank == 0)
    changed = replace(plan, tile_orders=(TileOrder(0, queue, rows),))
    steps = launch_steps(changed)
    positions = [at for at, step in enumerate(steps) if (step.operation.rank, step.operation.queue) == (0, queue)]
    launch = next(each for each in kernel_launches(changed, steps) if each.first == positions[0])
    assert launch.runs == tuple(QueueRun(positions[operation], *rest) for operation, *rest in runs)
