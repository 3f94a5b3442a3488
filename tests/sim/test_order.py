"""What a plan says about order, read from the catalog's plans."""

from __future__ import annotations

from msgspec.structs import replace

from overweave.ir.plan import Problem
from overweave.ir.schedule import Compute
from overweave.schedules.catalog import build
from overweave.sim.order import launches_of, steps_of, tile_counts

PROBLEM = Problem(operator="matmul_reduce_scatter", m=1024, n=512, k=128, world_size=2, dtype="bfloat16")


def test_sums_follow_all_tiles_and_tiles_follow_nothing():
    plan = build("matmul_reduce_scatter.scatter", PROBLEM, {})
    queues = tuple(replace(queue, after=("tiles",) * (queue.name == "sums")) for queue in plan.schedule.queues)
    steps = steps_of(replace(plan, schedule=replace(plan.schedule, queues=queues)))
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
    for position, step in enumerate(steps_of(plan)):
        key = step.operation.rank, step.operation.queue
        assert step.done == ((last[key],) if key in last else ())
        last[key] = position


def test_one_launch_per_rank_and_kernel_queue_holds_every_tile():
    plan = build("matmul_reduce_scatter.scatter", PROBLEM, {})
    steps = steps_of(plan)
    launches = launches_of(plan, steps)
    assert len(launches) == 4
    counts = tile_counts(launches)
    for position, step in enumerate(steps):
        if isinstance(step.operation, Compute):
            assert counts[position] == step.operation.tiles
