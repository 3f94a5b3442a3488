"""Kernels that start early or late where no kernel computes tiles: sums and pushes beside library matmuls."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from campaigns.oracle.plans.library_scatter import scatter
from overweave.ir.plan import COPY_ENGINE, COPY_KERNEL, LIBRARY, Engine, EngineAssignment, Plan
from overweave.ir.schedule import Copy, Queue
from overweave.ir.verify.plan import MachineLimits, verify_plan
from tests.plans import rules

PUSHES: dict[str, Engine] = {"copy_engine": COPY_ENGINE, "copy_kernel": COPY_KERNEL}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("pushes", PUSHES)
def test_sums_behind_all_else_are_proven(pushes: str, parts: int):
    plan = scatter(PUSHES[pushes], ("main", "copies"), parts=parts)
    assert rules(plan) == set(), verify_plan(plan, MachineLimits()).refusals


def test_sums_that_may_take_every_sm_before_pushes_have_any_are_refused():
    """Both ranks' sums wait for the other's pushes, whose kernels never start."""
    assert rules(scatter(COPY_KERNEL, ())) == {"residency"}
    assert rules(scatter(COPY_KERNEL, ("copies",))) == set()
    assert rules(scatter(COPY_ENGINE, ())) == set()


def test_sums_that_may_keep_the_next_matmul_from_its_sm_are_refused():
    assert rules(scatter(COPY_ENGINE, (), parts=2)) == {"residency"}
    assert rules(scatter(COPY_ENGINE, ("main",), parts=2)) == set()


def test_streams_that_start_in_too_many_orders_are_not_decided():
    """Each of so many calls of a library may start as launched, or late."""
    plan = scatter(COPY_ENGINE, ("main",))
    names = [f"aside.{at}" for at in range(30)]
    idle = tuple(Copy(name=name, rank=0, queue=name, sources=(), destinations=()) for name in names)
    queues = (*plan.schedule.queues, *(Queue(name, "complete") for name in names))
    engines = (*plan.realization.engines, *(EngineAssignment(name, LIBRARY) for name in names))

    def beside(count: int) -> Plan:
        last = len(queues) - len(names) + count
        operations = (*plan.schedule.operations, *idle[:count])
        schedule = replace(plan.schedule, queues=queues[:last], operations=operations)
        return replace(plan, schedule=schedule, realization=replace(plan.realization, engines=engines[:last]))

    assert verify_plan(beside(6), MachineLimits()).outcome == "proven"
    assert verify_plan(beside(30), MachineLimits()).outcome == "not decided"
