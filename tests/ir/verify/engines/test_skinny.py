"""A matmul of few rows in the library's place: proven as the library's is, and refused where it cannot compute."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import Plan
from overweave.ir.schedule import Compute, Region
from overweave.ir.text.files import from_json, to_json
from overweave.schedules.catalog.catalog import build
from tests.plans import plan_of, refusals, with_operations

PLANS = (
    "matmul_all_reduce.one_shot_packed",
    "matmul_all_reduce.two_shot_packed",
    "matmul_reduce_scatter.scatter_packed",
    "all_gather_matmul.gather_packed",
)


def made(name: str, m: int = 7, matmul: str = "skinny", **problem: object) -> Plan:
    return plan_of(name, {"matmul": matmul}, m=m, k=16, **problem)


@pytest.mark.parametrize("m", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("name", PLANS)
def test_it_is_proven_and_the_schedule_stays_the_same(name: str, m: int) -> None:
    plans = [made(name, m, matmul) for matmul in ("library", "skinny", "early")]
    assert [refusals(plan) for plan in plans] == ["", "", ""]
    assert len({plan.schedule for plan in plans}) == 1
    configs = [plan.realization.skinny for plan in plans]
    assert configs[0] is None
    assert configs[2] == replace(configs[1], early=True)


def test_several_weights_and_what_was_gathered() -> None:
    assert refusals(made(PLANS[-1], columns=(16, 32), returns_gathered=True)) == ""


def test_it_is_stored_with_the_plan() -> None:
    plan = made(PLANS[0], matmul="early")
    assert from_json(to_json(plan)) == plan


def test_what_it_does_not_compute_is_refused() -> None:
    plan = made(PLANS[-1])
    assert "no epilogue" in refusals(replace(plan, problem=replace(plan.problem, epilogue=Epilogue(bias=True))))
    wide = replace(plan.problem, dtype="float32"), replace(plan.realization, dtype="float32")
    assert "16-bit" in refusals(replace(plan, problem=wide[0], realization=wide[1]))


def test_other_plans_do_not_launch_it() -> None:
    other = build("matmul_all_reduce.sequential", made(PLANS[0]).problem, {})
    realization = replace(other.realization, skinny=made(PLANS[0]).realization.skinny)
    assert "only plans of packed messages" in refusals(replace(other, realization=realization))


def test_it_multiplies_whole_buffers() -> None:
    plan = made(PLANS[-1])
    (compute, *_) = (each for each in plan.schedule.operations if isinstance(each, Compute) and each.rank == 0)
    halves = [Region(part.buffer, 0, rows, part.cols) for part in compute.a for rows in ((0, 3), (3, 7))]
    outs = [Region(part.buffer, 0, rows, part.cols) for part in compute.out for rows in ((0, 3), (3, 7))]
    cut = replace(compute, a=tuple(halves), out=tuple(outs))
    operations = tuple(cut if each is compute else each for each in plan.schedule.operations)
    found = refusals(with_operations(plan, operations))
    assert "one whole buffer by another" in found
