"""What our matmul of few rows saves: the measured numbers at their places, between them, and nothing far away."""

from __future__ import annotations

import re

import pytest

from overweave.hardware.machine import load
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.sim.few_rows import SAVED, saved_us
from overweave.sim.simulate import total_us
from tests.source_tree import ROOT

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
    for kind, layers in SAVED.items():
        *early, exchange = kind.split()
        matmul = "early" if early else "skinny"
        for layer in layers:
            for rows, us in zip((1, 16, 64), layer.us, strict=True):
                took = table[rows, layer.n, layer.k]
                gains = [took[plan] - took[f"{plan} matmul={matmul}"] for plan in PLANS[exchange]]
                assert us == pytest.approx(sum(gains) / len(gains), abs=0.11), (kind, layer, rows)


@pytest.mark.parametrize(
    ("name", "kind"), [("matmul_all_reduce.one_shot_packed", "sum"), ("all_gather_matmul.gather_packed", "gather")]
)
def test_it_is_what_a_plan_is_predicted_to_save(name: str, kind: str) -> None:
    layer, machine = SAVED[f"early {kind}"][1], load("h200x4")
    took = {how: total_us(plan_of(name, how, 1, layer.n, layer.k), machine) for how in ("library", "early")}
    assert took["library"] - took["early"] == pytest.approx(layer.us[0], abs=1e-6)


def test_between_and_beyond() -> None:
    how = plan_of("matmul_all_reduce.one_shot_packed", "early").realization
    at = [saved_us(how, rows, 4096, 3584) for rows in (1, 4, 16, 32, 64, 500)]
    assert at == sorted(at, reverse=True)
    assert at[1] == pytest.approx((at[0] + at[2]) / 2)
    assert at[4] == at[5]
    assert saved_us(how, 1, 4200, 3400) == at[0]
    assert saved_us(how, 1, 64, 64) == saved_us(how, 0, 4096, 3584) == 0.0
    library = plan_of("matmul_all_reduce.one_shot_packed", "library").realization
    assert saved_us(library, 1, 4096, 3584) == 0.0
