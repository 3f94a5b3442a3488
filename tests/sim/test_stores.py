"""What tiles that store at peers take."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.hardware.machine import load
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Compute
from overweave.schedules.catalog.catalog import build
from overweave.sim.cost import Costs, KernelCost
from overweave.sim.order import QueueRun, launch_steps
from overweave.sim.ports import links_bound_us
from overweave.sim.simulate import simulate

MACHINE = load("h200x4")
DEEP = Problem(operator="matmul_reduce_scatter", m=8192, n=4096, k=7168, world_size=4, dtype="bfloat16")
SHALLOW = replace(DEEP, k=128)
OPTIONS = {"kernel": "hopper"}


def stored(problem: Problem) -> Plan:
    return build("matmul_reduce_scatter.scatter_stored", problem, OPTIONS)


def work_of(problem: Problem, owner: int) -> KernelCost:
    """Of a tile of the first operation of rank 0 that computes an owner's rows."""
    plan = stored(problem)
    tiles = (each for each in launch_steps(plan) if each.operation.rank == 0 and isinstance(each.operation, Compute))
    step = next(each for each in tiles if each.operation.a[0].rows[0] // (problem.m // problem.world_size) == owner)
    return Costs(plan, MACHINE).tiles(step, QueueRun(0, 256), 256, 256)


def test_a_tile_is_stored_beside_the_next_one_unless_the_link_is_slower():
    deep, shallow = work_of(DEEP, 1), work_of(SHALLOW, 1)
    assert work_of(DEEP, 0).stored_us == 0.0
    assert 10 < deep.stored_us < 15  # 132 SMs with 32 KiB each
    assert deep.tile_us == work_of(DEEP, 0).tile_us
    assert shallow.tile_us == deep.stored_us
    assert shallow.stored_us == work_of(SHALLOW, 0).tile_us  # what the next tile does meanwhile


def test_pieces_share_the_link():
    """However finely shards are cut, no call is quicker for it than its link allows."""
    times = [
        simulate(build("matmul_reduce_scatter.scatter_stored", SHALLOW, OPTIONS | {"pieces": pieces}), MACHINE).total_us
        for pieces in (1, 4)
    ]
    assert times[1] > 0.95 * times[0]


def test_no_call_is_quicker_than_its_link():
    for problem in (DEEP, SHALLOW):
        plan = stored(problem)
        timeline = simulate(plan, MACHINE)
        assert timeline.total_us >= 0.95 * links_bound_us(plan, MACHINE, timeline) > 100


@pytest.mark.slow
def test_sums_that_go_everywhere_take_longer_than_sums_that_stay():
    reduced = replace(SHALLOW, operator="matmul_all_reduce")
    everywhere = build("matmul_all_reduce.ring_stored", reduced, OPTIONS)
    stays = build("matmul_reduce_scatter.ring_stored", SHALLOW, OPTIONS)
    assert simulate(everywhere, MACHINE).total_us > simulate(stays, MACHINE).total_us + 50
