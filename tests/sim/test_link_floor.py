"""No prediction is below what the links take for the bytes of a plan."""

from __future__ import annotations

from msgspec.structs import replace

from overweave.hardware.machine import load
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.sim.ports import links_bound_us
from overweave.sim.simulate import simulate

H200 = load("h200x4")
PROBLEM = Problem(operator="matmul_all_reduce", m=4096, n=4096, k=64, world_size=4, dtype="bfloat16")
SHOT_BYTES = 3 * 1024 * 4096 * 2  # through every port, each way, in each shot


def test_what_moves_nothing_has_no_floor():
    plan = build("matmul_all_reduce.two_shot", replace(PROBLEM, world_size=1), {})
    assert links_bound_us(plan, H200, simulate(plan, H200)) == 0
