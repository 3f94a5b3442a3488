"""What tiles that store at peers take."""

from __future__ import annotations

from msgspec.structs import replace

from overweave.hardware.machine import load
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Compute, Operation
from overweave.schedules.catalog.catalog import build
from overweave.sim.cost import Work, parts_of_tile, stores_us
from overweave.sim.link_floor import floor_us
from overweave.sim.simulate import simulate

MACHINE = load("h200x4")
DEEP = Problem(operator="matmul_reduce_scatter", m=8192, n=4096, k=7168, world_size=4, dtype="bfloat16")
SHALLOW = replace(DEEP, k=128)
OPTIONS = {"kernel": "hopper"}


def stored(problem: Problem) -> Plan:
    return build("matmul_reduce_scatter.scatter_stored", problem, OPTIONS)


def times(operation: Operation, work: Work) -> tuple[float, float]:
    """How long a tile has its SM, and is stored behind that."""
    assert isinstance(operation, Compute)
    config = stored(DEEP).realization.matmul
    busy_us, _, stored_us = parts_of_tile(MACHINE, stored(DEEP).schedule, operation, (config, "bfloat16", work))
    return busy_us, stored_us


def test_a_tile_is_stored_beside_the_next_one_unless_the_link_is_slower():
    product = next(
        each for each in stored(DEEP).schedule.operations if each.rank == 0 and each.name.startswith("store")
    )
    own = next(each for each in stored(DEEP).schedule.operations if each.rank == 0 and "own" in each.name)
    deep, shallow = Work(256, 100.0), Work(256, 1.0)
    assert stores_us(MACHINE, own, "bfloat16", deep, 256) == 0.0  # type: ignore[arg-type]
    stored_us = stores_us(MACHINE, product, "bfloat16", deep, 768)  # type: ignore[arg-type]
    assert 10 < stored_us < 15  # 132 SMs with 32 KiB each
    assert times(product, deep) == (100.0, stored_us)
    assert times(product, shallow) == (stored_us, 1.0)  # what the next tile does meanwhile


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
        assert timeline.total_us >= 0.95 * floor_us(plan, MACHINE.links, timeline) > 100


def test_sums_that_go_everywhere_take_longer_than_sums_that_stay():
    reduced = replace(SHALLOW, operator="matmul_all_reduce")
    everywhere = build("matmul_all_reduce.ring_stored", reduced, OPTIONS)
    stays = build("matmul_reduce_scatter.ring_stored", SHALLOW, OPTIONS)
    assert simulate(everywhere, MACHINE).total_us > simulate(stays, MACHINE).total_us + 50
