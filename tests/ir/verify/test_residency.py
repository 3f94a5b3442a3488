"""Kernels that start early or late where no kernel computes tiles: sums and pushes beside library matmuls."""

from __future__ import annotations

import pytest

from campaigns.oracle.library_scatter import scatter
from overweave.ir.plan import COPY_ENGINE, COPY_KERNEL, Engine, Plan
from overweave.ir.verify.plan import MachineLimits, verify_plan

PUSHES: dict[str, Engine] = {"copy_engine": COPY_ENGINE, "copy_kernel": COPY_KERNEL}


def rules(plan: Plan) -> set[str]:
    return {refusal.rule for refusal in verify_plan(plan, MachineLimits()).refusals}


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
