"""Which plan an operator of experts takes, and why: the answer of `overweave explain`."""

from __future__ import annotations

from overweave.moe.cases import ExpertsCase
from overweave.moe.overlapped import LEAST_BYTES, reason_not_quicker
from overweave.moe.predicted import BYTES, predicted_plans
from overweave.schedules.records.experts import NOT_MEASURED, PLANS, PUSH, SEQUENTIAL
from overweave.tuner.model.candidate_model import Weighed
from overweave.tuner.model.choose import Choice
from overweave.tuner.space.target import Target

UNREACHED = "GPUs do not reach each other's memory"
MANY_TOKENS = (
    f"a rank's tokens are {LEAST_BYTES} bytes or more, from which on it was measured to be quicker (2 x H200); "
    f"{SEQUENTIAL} runs where gradients are asked for"
)


def explain_layer(operator: str, case: ExpertsCase, ranks: int, target: Target) -> Choice:
    """The plan that a call of `operator` takes if its `plan=` is None and nobody asks for gradients; what each plan is
    predicted to take on the target's machine, in bf16, and what cannot run there. Raises InputError for sizes that
    ranks cannot split, or are no whole words."""
    case.check(ranks)
    machine = target.machine(ranks)
    times = {} if machine is None else predicted_plans(operator, case, ranks, machine)
    reason = NOT_MEASURED.get(operator) or reason_not_quicker(ranks, target.kind, _shard_bytes(case, ranks))
    if not reason and not target.peer_access:
        reason = UNREACHED
    name = SEQUENTIAL if reason else PUSH
    return Choice(
        plan=f"{operator}.{name}",
        options={},
        reason=reason or MANY_TOKENS,
        text=name,
        weights=tuple(_weighed(plan, times, machine is not None) for plan in PLANS),
        library=SEQUENTIAL,
        machine=str(target.found) if machine is not None else "",
    )


def _shard_bytes(case: ExpertsCase, ranks: int) -> int:
    return case.routing.tokens // ranks * case.hidden * BYTES


def _weighed(plan: str, times: dict[str, float], is_described: bool) -> Weighed[str]:
    return Weighed(plan, times.get(plan), UNREACHED if is_described and plan not in times else "")
