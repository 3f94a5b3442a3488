"""No prediction is below what the links take for the bytes of a plan."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.hardware.machine import load
from overweave.ir.plan import Problem
from overweave.ir.schedule import Get
from overweave.schedules.catalog import build
from overweave.sim.link_floor import floor_us
from overweave.sim.simulate import simulate, total_us

H200 = load("h200x4")
PROBLEM = Problem(operator="matmul_all_reduce", m=4096, n=4096, k=64, world_size=4, dtype="bfloat16")
SHOT_BYTES = 3 * 1024 * 4096 * 2  # through every port, each way, in each shot


def test_pulls_of_several_pieces_share_one_port():
    plan = build("matmul_all_reduce.two_shot_pull", PROBLEM, {"pieces": 8})
    timeline = simulate(plan, H200)
    begin_us = min(span.begin_us for span in timeline.spans if span.name.startswith("sum"))
    peak = max(rate for _, rate in H200.links.sm_pull.points)
    floor = floor_us(plan, H200.links, timeline)
    assert floor == pytest.approx(begin_us + 2 * SHOT_BYTES / peak / 1e3)
    assert total_us(plan, H200) == max(floor, timeline.total_us)


def test_pieces_that_are_summed_at_once_take_no_less_than_the_link_gives():
    """Each once had the link for itself, so that two shots of four pieces took less than their bytes do."""
    peak = max(rate for _, rate in H200.links.sm_pull.points)
    for pieces in (1, 2, 4):
        few = replace(PROBLEM, m=PROBLEM.m // 4)  # so that each piece has fewer tiles than there are SMs
        timeline = simulate(build("matmul_all_reduce.two_shot_pull", few, {"pieces": pieces}), H200)
        sums = [span for span in timeline.spans if span.name.startswith("sum") and span.rank == 0]
        took_us = max(span.end_us for span in sums) - min(span.begin_us for span in sums)
        assert took_us > 0.95 * SHOT_BYTES / 4 / peak / 1e3


def test_a_kernels_stores_and_gets_beside_them_share_one_port():
    plan = build("matmul_all_reduce.two_shot_stored", PROBLEM, {"pieces": 2})
    timeline = simulate(plan, H200)
    assert floor_us(plan, H200.links, timeline) > 2 * SHOT_BYTES / 376 / 1e3
    stored = [each for each in plan.schedule.operations if not isinstance(each, Get)]
    without_gets = replace(plan, schedule=replace(plan.schedule, operations=tuple(stored)))
    assert floor_us(without_gets, H200.links, timeline) < floor_us(plan, H200.links, timeline)


def test_what_moves_nothing_has_no_floor():
    plan = build("matmul_all_reduce.two_shot_pull", replace(PROBLEM, world_size=1), {})
    assert floor_us(plan, H200.links, simulate(plan, H200)) == 0
