"""The model of packed messages beside what two H200s measured, at the sizes of decoding: its times and its choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from overweave.ir.plan import Problem
from overweave.sim.cost import library_matmul_us
from overweave.tuner.rank import cold_choice, machine_of, predict_us, weigh
from overweave.tuner.space import candidate
from overweave.tuner.target import Target
from tests.source_tree import ROOT

FILE = ROOT / "benchmarks" / "results" / "packed.h200x2.2026-11-22.txt"
GPU, OPERATOR = Target("cuda"), "matmul_all_reduce"
ONE, TWO = "one_shot_packed", "two_shot_packed"


class Measured(NamedTuple):
    """A row of the file: microseconds by plan, and of the matmul alone."""

    problem: Problem
    matmul_us: float
    us: dict[str, float]


def rows() -> list[Measured]:
    found = []
    for line in FILE.read_text().splitlines():
        words = line.split()
        if len(words) > 12 and all(word.isdigit() for word in words[:3]):
            m, n, k = map(int, words[:3])
            problem = Problem(operator=OPERATOR, m=m, n=n, k=k, world_size=2, dtype="bfloat16")
            named = dict(zip(("sequential", "torch.one_shot", "torch.two_shot"), map(float, words[4:7]), strict=True))
            named |= dict(zip(words[7:13:2], map(float, words[8:13:2]), strict=True))
            found.append(Measured(problem, float(words[3]), named))
    return found


ROWS = rows()


def exposed_us(row: Measured, plan: str) -> float:
    """Beyond the matmul alone, as predicted."""
    machine, problem = machine_of(GPU, 2), row.problem
    assert machine is not None
    alone_us = library_matmul_us(machine, (problem.m, problem.n, problem.k), problem.dtype)
    return predict_us(problem, GPU, candidate(plan, {}), machine) - alone_us


@pytest.mark.parametrize(("plan", "within_us"), [(ONE, 1.5), (TWO, 1.7), ("torch.two_shot", 1.5), ("sequential", 1.5)])
def test_what_is_exposed_is_predicted(plan: str, within_us: float):
    for row in ROWS:
        measured_us = row.us[plan] - row.matmul_us
        assert exposed_us(row, plan) == pytest.approx(measured_us, abs=within_us), row


def test_the_choice_is_the_quickest_or_nearly_so():
    assert len(ROWS) == 20
    shares = []
    for row in ROWS:
        taken = cold_choice(weigh(row.problem, GPU, is_thorough=False), OPERATOR).candidate.plan
        shares.append(min(row.us.values()) / row.us[taken])
    assert min(shares) > 0.96
    assert sum(shares) / len(shares) > 0.99


OTHERS = ROOT / "benchmarks" / "results" / "packed_gather_scatter.h200x2.2026-11-22.txt"


def gathers_and_scatters() -> Iterator[tuple[Problem, dict[str, float]]]:
    """Microseconds of a problem by plan; `nccl` and `torch` are theirs."""
    operator = ""
    for line in OTHERS.read_text().splitlines():
        name, words = line.partition(":")[0], line.split()
        operator = name if name in ("all_gather_matmul", "matmul_reduce_scatter") else operator
        if operator and words and words[0].isdigit():
            m, n, k = map(int, words[:3])
            pairs = zip(words[3:-6:2], words[4:-6:2], strict=True)  # behind them: "1.50 x the best of theirs"
            problem = Problem(operator=operator, m=m, n=n, k=k, world_size=2, dtype="bfloat16")
            yield problem, {plan: float(us) for plan, us in pairs}


def test_gathers_and_scatters_of_decoding_are_packed_as_is_quickest():
    measured = list(gathers_and_scatters())
    assert len(measured) == 32
    for problem, times in measured:
        chosen = cold_choice(weigh(problem, GPU), problem.operator).candidate.plan
        others = [us for plan, us in times.items() if plan not in ("matmul", chosen)]
        assert chosen in times, problem
        assert times[chosen] < min(others), problem
