"""What our matmul of few rows saves: the measured numbers at their places, between them, and nothing far away."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from overweave.hardware.machine import FewRows, load
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.sim.simulate import total_us
from tests.source_tree import ROOT

MACHINE = load("h200x4")
KNOWN = MACHINE.few_rows
FILE = ROOT / "benchmarks" / "results" / "packed_skinny.h200x4.2026-11-22.txt"
ROW = re.compile(r"\s*(\d+)\s+(\d+)\s+(\d+)\s+(matmul .+)")
PLANS = {"sum": ("one_shot_packed", "two_shot_packed"), "gather": ("gather_packed",)}


def plan_of(name: str, matmul: str, m: int = 1, n: int = 4096, k: int = 3584) -> Plan:
    problem = Problem(operator=name.split(".")[0], m=m, n=n, k=k, world_size=4, dtype="bfloat16")
    return build(name, problem, {"matmul": matmul})


def measured() -> dict[tuple[int, int, int], dict[str, float]]:
    """Microseconds of each plan, by rows, n and k."""
    found = {}
    for line in FILE.read_text().splitlines():
        if row := ROW.fullmatch(line):
            times = re.findall(r"([a-z_]+_packed(?: matmul=\w+)?) ([\d.]+)", row[4])
            found[int(row[1]), int(row[2]), int(row[3])] = {name: float(us) for name, us in times}
    return found


def test_the_numbers_are_those_of_the_file() -> None:
    table = measured()
    assert len(table) == 24
    assert sorted((each.exchange, each.early, len(each.layers)) for each in KNOWN) == [
        ("gather", False, 4), ("gather", True, 4), ("sum", False, 4), ("sum", True, 4)
    ]  # fmt: skip
    for known in KNOWN:
        matmul = "early" if known.early else "skinny"
        for n, k, saved in known.layers:
            for rows, us in zip(known.rows, saved, strict=True):
                took = table[rows, n, k]
                gains = [took[plan] - took[f"{plan} matmul={matmul}"] for plan in PLANS[known.exchange]]
                assert us == pytest.approx(sum(gains) / len(gains), abs=0.11), (known.exchange, n, k, rows)


def known_of(exchange: str, early: bool) -> FewRows:
    return next(each for each in KNOWN if (each.exchange, each.early) == (exchange, early))


@pytest.mark.parametrize(
    ("name", "exchange"), [("matmul_all_reduce.one_shot_packed", "sum"), ("all_gather_matmul.gather_packed", "gather")]
)
def test_it_is_what_a_plan_is_predicted_to_save(name: str, exchange: str) -> None:
    n, k, us = known_of(exchange, True).layers[1]
    took = {how: total_us(plan_of(name, how, 1, n, k), MACHINE) for how in ("library", "early", "skinny")}
    assert took["library"] - took["early"] == pytest.approx(us[0], abs=1e-6)
    assert took["library"] > took["skinny"] > took["early"]


def test_between_and_beyond() -> None:
    known = known_of("sum", True)
    at = [known.saved_us(rows, 4096, 3584) for rows in (1, 4, 16, 32, 64, 500)]
    assert at == sorted(at, reverse=True)
    assert at[1] == pytest.approx((at[0] + at[2]) / 2)
    assert at[4] == at[5]
    assert known.saved_us(1, 4200, 3400) == at[0]
    assert known.saved_us(1, 64, 64) == known.saved_us(0, 4096, 3584) == 0.0


def test_nothing_is_saved_on_a_machine_that_was_not_measured() -> None:
    unknown = replace(MACHINE, few_rows=())
    took = [total_us(plan_of("matmul_all_reduce.one_shot_packed", how), unknown) for how in ("library", "skinny")]
    assert took[0] == took[1]
