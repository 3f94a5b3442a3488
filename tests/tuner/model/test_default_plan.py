"""The rule by size: which plan, and that every other candidate is rejected aloud."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS
from overweave.tuner.model import choose as choosing
from overweave.tuner.model.choose import default_plan, predicted_us, wire_bytes
from overweave.tuner.space.space import Candidate, reason_unsupported
from overweave.tuner.space.target import Target, tile_options

GPU, CPU = Target("cuda", name="NVIDIA Unheard"), Target("cpu")


def problem_of(operator: str, **changes: object) -> Problem:
    made = Problem(operator=operator, m=8192, n=3584, k=4096, world_size=4, dtype="bfloat16")
    changed = replace(made, **changes)
    return replace(changed, m=changed.record.whole_rows(changed.m, changed.world_size))


@pytest.fixture(params=OPERATORS)
def operator(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_large_problem_overlaps_with_the_kernel_of_its_gpu(operator: str):
    choice = default_plan(problem_of(operator), GPU)
    assert choice.plan == f"{operator}.{OPERATORS[operator].size_rule.overlapped}"
    assert choice.options == {"kernel": "hopper", "sms": 132, "pieces": 1} | OPERATORS[operator].size_rule.options
    assert default_plan(problem_of(operator), replace(GPU, is_hopper=False)).options["kernel"] == "portable"
    assert default_plan(problem_of(operator), replace(GPU, sms=100)).options["sms"] == 100


@pytest.mark.parametrize(
    ("changes", "plan", "why"),
    [
        ({"m": 4}, "sequential", "overlap pays from"),
        ({"n": 512, "k": 512}, "sequential", "the plain calls take about"),
        ({"n": 3585}, "", "n=3585"),
        ({"k": 4100}, "", "multiples of 8"),
        ({"dtype": "float32"}, "", "outside the tensor cores"),
        ({"m": 4, "dtype": "float32"}, "sequential", "overlap pays from"),
    ],
)
def test_where_overlap_loses_or_cannot_run_it_says_so(operator: str, changes: dict[str, object], plan: str, why: str):
    choice = default_plan(problem_of(operator, **changes), GPU)
    assert choice.plan == f"{operator}.{plan or OPERATORS[operator].size_rule.without_kernel}"
    ((rejected, reason),) = choice.rejected
    assert rejected == f"{operator}.{OPERATORS[operator].size_rule.overlapped}"
    assert why in reason
    assert f"not {rejected}: {reason}" in str(choice)


def test_a_cpu_emulates_the_overlapped_plan_whatever_the_size(operator: str):
    for changes in ({"m": 4}, {"dtype": "float32"}, {}):
        choice = default_plan(problem_of(operator, **changes), CPU)
        assert choice.plan == f"{operator}.{OPERATORS[operator].size_rule.overlapped}"
        assert choice.options == {}
    assert (
        default_plan(problem_of(operator, n=7), CPU).plan
        == f"{operator}.{OPERATORS[operator].size_rule.without_kernel}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", [GPU, CPU, replace(GPU, is_hopper=False)])
def test_every_choice_can_be_built(operator: str, target: Target):
    sizes = ({}, {"n": 33, "k": 9}, {"m": 0}, {"m": 3}, {"m": 1 << 16})
    for dtype, changes in product(("bfloat16", "float16", "float32"), sizes):
        problem = problem_of(operator, **{"dtype": dtype, "n": 256, "k": 128} | changes)
        choice = default_plan(problem, target)
        assert choice.reason
        assert build(choice.plan, problem, choice.options, rank=0).name == choice.plan


def test_what_a_tile_kernel_takes():
    problem = problem_of("all_gather_matmul", dtype="float32", n=4, k=12)
    assert reason_unsupported(problem, CPU, Candidate("push"), "device") == ""
    assert "multiples of 4" in reason_unsupported(replace(problem, n=6), CPU, Candidate("push"), "device")
    assert tile_options(CPU, METHODS["all_gather_matmul.push"]) == {}


def test_the_rule_adds_one_matmul_and_one_collective(operator: str):
    """In us: FLOP over TFLOP/s, bytes over GB/s; overlap is taken from the measured time on, to the microsecond."""
    rule, problem = OPERATORS[operator].size_rule, problem_of(operator, n=4096)
    matmul_us = 2 * 8192 * 4096 * 4096 / (choosing.TFLOPS * 1e12) * 1e6
    ways = 2 if operator == "matmul_all_reduce" else 1  # scattered, and gathered again
    wire_us = ways * 8192 * 4096 * 2 * 0.75 / (choosing.WIRE_GB_PER_S * 1e9) * 1e6
    assert predicted_us(problem) == pytest.approx(matmul_us + wire_us)
    last = next(m for m in range(8, 8192, 8) if predicted_us(replace(problem, m=m)) >= choosing.PAYS_FROM_US)
    assert default_plan(replace(problem, m=last), GPU).plan == f"{operator}.{rule.overlapped}"
    assert default_plan(replace(problem, m=last - 8), GPU).plan == f"{operator}.sequential"


def test_bytes_on_the_wire():
    """All rows but the own: of x for the gather, of the partial sums for the scatter."""
    assert wire_bytes(problem_of("all_gather_matmul")) == 8192 * 4096 * 2 * 3 // 4
    assert wire_bytes(problem_of("matmul_reduce_scatter")) == 8192 * 3584 * 2 * 3 // 4
    assert wire_bytes(problem_of("all_gather_matmul", world_size=1)) == 0
