"""Plans that GPU campaigns name are there: no run on a GPU ends with a name that is gone."""

from __future__ import annotations

import pytest

from campaigns.exact import ended_sums, gpu_exactness, gpu_faults, gpu_fp8, gpu_norms, gpu_packed
from campaigns.host import host_cases
from overweave.ops.call.plan_words import candidate_of

NAMED = (
    *((operator, plan) for operator, plans in gpu_exactness.PLANS.items() for plan in plans if plan),
    *gpu_exactness.LONG_RUNS,
    *((case.operator, case.plan) for case in gpu_faults.CASES),
    *((lost[0].operator, lost[0].plan) for lost in gpu_faults.LOST),
    *((case.operator, case.plan) for case in host_cases.CASES),
    *ended_sums.PLANS,
    *((host_cases.REDUCE, plan) for plan in gpu_norms.PLANS),
    *(("all_gather_matmul", plan) for plan in gpu_fp8.GATED),
    *gpu_packed.BETWEEN,
    *gpu_packed.PULLS.items(),
)


@pytest.mark.parametrize(("operator", "plan"), dict.fromkeys(NAMED), ids=str)
def test_a_named_plan_is_there(operator: str, plan: str):
    candidate_of(operator, plan)
