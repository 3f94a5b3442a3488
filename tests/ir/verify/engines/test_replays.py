"""What a captured call may not contain: what a replay would do otherwise."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.ir.plan import Plan
from overweave.ir.schedule import ECHOES, Get, Put
from overweave.ir.verify.engines.replays import check_replays
from overweave.ir.verify.rules.graphs import build_graph
from overweave.ir.verify.rules.verdict import Findings
from tests.plans import plan_of, with_schedule


def refusals(plan: Plan) -> list[str]:
    findings = Findings()
    check_replays(plan, build_graph(plan.schedule, findings), findings)
    return [str(one) for one in findings.refusals if one.rule == "replay"]


def test_plans_with_a_head_and_without_may_be_captured():
    for name in ("all_gather_matmul.push", "all_gather_matmul.pull", "matmul_all_reduce.one_shot_packed"):
        assert refusals(plan_of(name)) == []


@pytest.mark.parametrize(
    ("kind", "field", "buffer"), [(Put, "destinations", "y"), (Get, "sources", "x")], ids=["push", "pull"]
)
def test_a_peers_tensor_may_lie_elsewhere_in_its_next_replay(kind: type, field: str, buffer: str):
    plan = plan_of("all_gather_matmul.pull" if kind is Get else "all_gather_matmul.push")
    move = next(one for one in plan.schedule.operations if isinstance(one, kind))
    part = replace(getattr(move, field)[0], buffer=buffer, rows=(0, 32))
    others = tuple(replace(one, **{field: (part,)}) if one is move else one for one in plan.schedule.operations)
    (said,) = refusals(with_schedule(plan, operations=others))
    assert "a graph does not know where the tensors of rank" in said


def test_only_packed_messages_go_without_a_head():
    assert (
        "packed kernels reuse memory by echoes"
        in refusals(with_schedule(plan_of("all_gather_matmul.push"), reuse=ECHOES))[0]
    )
    packed = plan_of("matmul_all_reduce.one_shot_packed")
    assert "packed kernels reuse memory by echoes" in refusals(with_schedule(packed, reuse="credits"))[0]


def test_without_a_head_nobody_zeroes_signals():
    plan = plan_of("matmul_all_reduce.one_shot_packed")
    told = plan.schedule.operations[1].notifies or next(
        one.notifies for one in plan.schedule.operations if one.notifies
    )
    first = plan.schedule.operations[0]
    loud = tuple(replace(one, notifies=told) if one is first else one for one in plan.schedule.operations)
    assert any("only messages carry signals" in said for said in refusals(with_schedule(plan, operations=loud)))
