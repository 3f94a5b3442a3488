"""Packed messages on the paper machine: one shot where latency counts, two where bytes do."""

from __future__ import annotations

import pytest

from overweave.hardware.machine import load
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.sim.realize import realize
from overweave.sim.simulate import simulate, total_us

H200X4 = load("h200x4")


def took_us(method: str, m: int, n: int = 4096) -> float:
    problem = Problem(operator="matmul_all_reduce", m=m, n=n, k=1024, world_size=4, dtype="bfloat16")
    return total_us(build(f"matmul_all_reduce.{method}", problem, {}), H200X4)


@pytest.mark.parametrize("n", [4096, 8192])
def test_two_shots_pay_where_bytes_count(n: int):
    assert took_us("one_shot_packed", 1, n) < took_us("two_shot_packed", 1, n)
    assert took_us("two_shot_packed", 256, n) < took_us("one_shot_packed", 256, n)


def test_sums_are_shared_behind_them_and_without_another_launch():
    problem = Problem(operator="matmul_all_reduce", m=64, n=4096, k=1024, world_size=4, dtype="bfloat16")
    plan = build("matmul_all_reduce.two_shot_packed", problem, {})
    spans = {span.name: span for span in simulate(plan, H200X4).spans}
    push, total, share, move = (spans[name] for name in ("push.1-0", "sum.0", "share.0-1", "move.1"))
    assert push.end_us < total.begin_us < total.end_us <= share.begin_us < share.end_us < move.begin_us
    gap = (push.end_us - push.begin_us) - (share.end_us - share.begin_us)
    once = H200X4.latency.kernel.us + H200X4.latency.copy_tile.us
    assert gap == pytest.approx(once, abs=0.01)  # spans are rounded


PLANS = {
    "one_shot": "matmul_all_reduce.one_shot_packed",
    "two_shot": "matmul_all_reduce.two_shot_packed",
    "scatter": "matmul_reduce_scatter.scatter_packed",
    "gather": "all_gather_matmul.gather_packed",
}


@pytest.mark.parametrize("m", [1, 2, 64])
@pytest.mark.parametrize("exchange", PLANS)
def test_a_schedule_alone_is_realized_with_its_exchange(exchange: str, m: int):
    operator = PLANS[exchange].split(".")[0]
    problem = Problem(operator=operator, m=m, n=48, k=16, world_size=4, dtype="bfloat16")
    packed = realize(build(PLANS[exchange], problem, {}).schedule, H200X4).realization.packed
    assert packed is not None
    assert packed.exchange == exchange


def test_a_gather_ends_before_the_matmul_begins_and_a_scatter_begins_behind_it():
    for exchange, first, second in (("gather", "move.1", "multiply.1"), ("scatter", "multiply.1", "push.1-2")):
        operator = PLANS[exchange].split(".")[0]
        problem = Problem(operator=operator, m=64, n=1024, k=1024, world_size=4, dtype="bfloat16")
        spans = {span.name: span for span in simulate(build(PLANS[exchange], problem, {}), H200X4).spans}
        assert spans[first].end_us <= spans[second].begin_us
