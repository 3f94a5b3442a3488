"""Plans that campaigns name are there: no run on a GPU ends with a name that is gone."""

from __future__ import annotations

import pytest

from campaigns import cases
from campaigns.exact import gpu_faults, gpu_packed
from campaigns.host import host_cases
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS
from overweave.schedules.records.record import Method
from overweave.tuner.space.space import candidate_of

NAMED = (
    *((operator, plan) for operator in cases.OPERATORS for plan in cases.every_plan(operator)),
    *cases.BY_ENGINES,
    *cases.IN_KERNELS,
    *((lost[0].operator, lost[0].plan) for lost in gpu_faults.LOST),
    *((case.operator, case.plan) for case in host_cases.CASES),
    *cases.OF_FP8,
    *gpu_packed.BETWEEN,
)


@pytest.mark.slow
def test_a_named_plan_is_there_and_is_built():
    for operator, plan in dict.fromkeys(map(tuple, NAMED)):
        candidate_of(operator, plan)
        problem = Problem(operator=operator, m=1000, n=512, k=512, world_size=4, dtype="bfloat16")
        named = cases.Named(operator, plan)
        build(named.full_name, problem, named.options)


def test_every_method_that_the_tuner_offers_is_gone_over():
    wanted = {name for name, method in METHODS.items() if method.grids or method.adds or method.dropped}
    exchanged = {plain.full_name for plain in cases.EXCHANGED}
    assert {plain.full_name for plain in cases.PLAIN} | exchanged == wanted
    every = [(operator, plan) for operator in cases.OPERATORS for plan in cases.every_plan(operator)]
    assert {cases.Named(*one).full_name for one in every} | exchanged == wanted


def test_all_engines_run_long_and_meet_faults():
    run = {(one.full_name, one.options.get("mover"), one.options.get("sums")) for one in cases.BY_ENGINES}
    offered = [method for method in METHODS.values() if method.operator in cases.OPERATORS and cases.offered(method)]
    fused: list[Method] = [method for method in offered if method.is_fused]
    assert {(method.full_name, None, None) for method in fused} <= run
    assert {("all_gather_matmul.push", "copy_kernel", None), ("matmul_all_reduce.two_shot", None, "epilogue")} <= run
    assert {case.operator for case in gpu_faults.CASES} == set(cases.OPERATORS)
