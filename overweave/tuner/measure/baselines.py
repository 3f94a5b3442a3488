"""The methods that a comparison holds side by side: the roofs, what torch ships, and ours.

`methods_of` says which rows an operator has: those of every operator, and the baselines that its record names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from msgspec.structs import replace

from overweave.ir.epilogue import NO_EPILOGUE
from overweave.ir.operators.registry import operator_of
from overweave.runtime.library.torch_fused import torch_answers
from overweave.schedules.records import outside
from overweave.schedules.records.needs import unmet
from overweave.schedules.records.record import MethodRequest
from overweave.tuner.measure.peer_copies import HAS_COPY_ENGINE
from overweave.tuner.measure.sides import BenchSide
from overweave.tuner.measure.trial import CallResult, CheckedCall
from overweave.tuner.space.target import target_of


class BaselineMethod(NamedTuple):
    """A row of the comparison. call: what is timed of a side, which begins with the number of the sample.

    is_roof: what a method is held against; the others compute the operator, and are checked before they are timed.
    lacks: what a side lacks for it, or an empty string. plan: of ours, as the operators' `plan=` takes it.
    """

    name: str
    label: str
    call: Callable[[BenchSide, int], CallResult]
    is_roof: bool = False
    lacks: Callable[[BenchSide], str] = lambda side: ""
    plan: str = ""

    def of(self, side: BenchSide) -> CheckedCall:
        """Of one side."""
        return lambda turn: self.call(side, turn)


def _copy_engine(side: BenchSide) -> str:
    return "" if side.setting.device.type == "cuda" and HAS_COPY_ENGINE else "needs CUDA and cuda-bindings"


def _copies(side: BenchSide, turn: int) -> CallResult:
    sent = side.start_copies(turn)
    side.join_copies()
    return sent


def _ceiling(side: BenchSide, turn: int) -> CallResult:
    side.start_copies(turn)
    result = side.matmul(turn)
    side.join_copies()
    return result


MATMUL, COMMUNICATION, COPIES, CEILING = "matmul", "communication", "copies", "ceiling"
SEQUENTIAL, OURS = "sequential", "overweave"
NAMED = "plan."  # before the names of plans that were asked for
ROOFS = (
    BaselineMethod(MATMUL, "matmul alone", BenchSide.matmul, True),
    BaselineMethod(COMMUNICATION, "communication: library", BenchSide.communicate, True),
    BaselineMethod(COPIES, "communication: copy engine", _copies, True, _copy_engine),
    BaselineMethod(CEILING, "ceiling: matmul beside copies", _ceiling, True, _copy_engine),
)
LIBRARY = BaselineMethod(SEQUENTIAL, "library: collective and matmul", BenchSide.sequential)


@torch_answers()
def _fused(side: BenchSide, turn: int) -> CallResult:
    """torch's fused operators: a gather or a reduce-scatter cut into shards beside their matmuls."""
    (x, w), name, ops = side.factors(turn), side.setting.group.name, torch.ops.symm_mem
    result: torch.Tensor
    if side.problem.record.gathers and side.ones:
        own, by_column = side.ones[0][: x.shape[0]], side.ones[1]
        made = ops.fused_all_gather_scaled_matmul(
            x, [w], own, [by_column], 0, name, [None], [None], [side.kept], [False]
        )
        result = made[1][0]
    elif side.problem.record.gathers:
        result = ops.fused_all_gather_matmul(x, [w], 0, name, return_A=False)[1][0]
    elif side.ones:
        shape = [side.problem.m, w.shape[1]]
        result = ops.fused_scaled_matmul_reduce_scatter(x, w, *side.ones, "sum", 0, 0, name, shape, out_dtype=side.kept)
    else:
        result = ops.fused_matmul_reduce_scatter(x, w, "sum", 0, name)
    return result


def _one_shot(side: BenchSide, turn: int) -> CallResult:
    side.multiply(*side.factors(turn), side.symmetric)
    result: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(side.symmetric, "sum", side.setting.group.name)
    return result


def _two_shot(side: BenchSide, turn: int) -> CallResult:
    side.multiply(*side.factors(turn), side.symmetric)
    result: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_(side.symmetric, "sum", side.setting.group.name)
    return result


_BY_TORCH: dict[str, tuple[str, Callable[[BenchSide, int], CallResult]]] = {
    outside.TORCH_FUSED: ("torch: fused (symm_mem)", _fused),
    outside.TORCH_ONE_SHOT: ("torch: matmul, one-shot (symm_mem)", _one_shot),
    outside.TORCH_TWO_SHOT: ("torch: matmul, two-shot (symm_mem)", _two_shot),
}


def row_of(plan: str) -> str:
    """The row of a baseline, by its plan."""
    return plan.replace(".", "_")


TORCH = tuple(map(row_of, _BY_TORCH))
TORCH_FUSED = TORCH[0]


def planned(plan: str | None) -> Callable[[BenchSide, int], CallResult]:
    """Our operator with a named plan of the catalog, or (None) with the plan it chooses."""
    return lambda side, turn: side.ours(turn, plan)


def _of_plan(name: str, plan: str) -> BaselineMethod:
    return BaselineMethod(name, f"overweave, plan {plan}", planned(plan), plan=plan)


def _baseline(plan: str) -> BaselineMethod:
    """A plan that the record of an operator names."""
    if plan not in _BY_TORCH:
        return _of_plan(row_of(plan), plan)
    label, by_torch = _BY_TORCH[plan]

    def call(side: BenchSide, turn: int) -> CallResult:
        return by_torch(side, turn) if side.is_bare else side.ours(turn, plan)

    def lacks(side: BenchSide) -> str:
        """Of a bare product torch scales fp8 itself, into what `kept` says."""
        problem, kept = side.problem, side.problem.result_dtype
        asked = replace(problem, epilogue=NO_EPILOGUE, dtype=kept, out_dtype=None) if side.is_bare else problem
        return unmet(
            MethodRequest(asked, {}, target_of(side.setting.device, side.setting.group)),
            outside.OUTSIDE[plan].needs,
            "device",
        )

    return BaselineMethod(row_of(plan), label, call, lacks=lacks)


def methods_of(operator: str, plans: tuple[str, ...] = ()) -> tuple[BaselineMethod, ...]:
    """The rows of an operator; those of plans asked for by name, if any, in place of the rows of ours."""
    baselines = [_baseline(plan) for plan in operator_of(operator).baselines]
    if not plans:
        return (*ROOFS, LIBRARY, *baselines, BaselineMethod(OURS, "overweave", planned(None)))
    named = (_of_plan(f"{NAMED}{plan}", plan) for plan in dict.fromkeys(plans))
    return (*ROOFS, LIBRARY, *(each for each in baselines if not each.plan), *named)
