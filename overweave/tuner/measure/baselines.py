"""The rows of a comparison: upper bounds (roofs), torch's operators, and ours.

`methods_of` returns the rows of an operator: those of every operator, and the baselines that its record names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from msgspec.structs import replace

from overweave.ir.epilogue import NO_EPILOGUE
from overweave.ir.operators.registry import operator_of
from overweave.runtime.library.library import use_torch_kernels
from overweave.schedules.records import outside
from overweave.schedules.records.needs import unmet
from overweave.schedules.records.record import MethodRequest
from overweave.tuner.measure.baseline_calls import HAS_COPY_ENGINE, BenchSide
from overweave.tuner.measure.trial import CallResult, CheckedCall
from overweave.tuner.space.target import target_of


class BaselineMethod(NamedTuple):
    """A row of the comparison. call: the timed call of an operator's inputs (Side); its argument is the sample's
    number.

    is_roof: an upper bound that others are compared with; the others compute the operator, and are checked before they
    are timed. lacks: why it cannot run on a side; "" if it can. plan: of ours, as the operators' `plan=` takes it.
    """

    name: str
    label: str
    call: Callable[[BenchSide, int], CallResult]
    is_roof: bool = False
    lacks: Callable[[BenchSide], str] = lambda side: ""
    plan: str = ""

    def of(self, side: BenchSide) -> CheckedCall:
        """Return the call on one side."""
        return lambda sample: self.call(side, sample)


def _copy_engine(side: BenchSide) -> str:
    return "" if side.setting.device.type == "cuda" and HAS_COPY_ENGINE else "needs CUDA and cuda-bindings"


def _copies(side: BenchSide, sample: int) -> CallResult:
    sent = side.start_copies(sample)
    side.join_copies()
    return sent


def _ceiling(side: BenchSide, sample: int) -> CallResult:
    side.start_copies(sample)
    result = side.matmul(sample)
    side.join_copies()
    return result


MATMUL, COMMUNICATION, COPIES, CEILING = "matmul", "communication", "copies", "ceiling"
SEQUENTIAL, OURS = "sequential", "overweave"
NAMED = "plan."  # prefix of the rows of plans that the caller named
ROOFS = (
    BaselineMethod(MATMUL, "matmul alone", BenchSide.matmul, True),
    BaselineMethod(COMMUNICATION, "communication: library", BenchSide.communicate, True),
    BaselineMethod(COPIES, "communication: copy engine", _copies, True, _copy_engine),
    BaselineMethod(CEILING, "ceiling: matmul beside copies", _ceiling, True, _copy_engine),
)
LIBRARY = BaselineMethod(SEQUENTIAL, "library: collective and matmul", BenchSide.sequential)


@use_torch_kernels()
def _fused(side: BenchSide, sample: int) -> CallResult:
    """Run torch's fused operator: a gather or a reduce-scatter cut into shards beside their matmuls."""
    (x, w), name, ops = side.factors(sample), side.setting.group.name, torch.ops.symm_mem
    result: torch.Tensor
    if side.problem.record.gathers and side.ones:
        own_scales, column_scales = side.ones[0][: x.shape[0]], side.ones[1]
        outputs = ops.fused_all_gather_scaled_matmul(
            x, [w], own_scales, [column_scales], 0, name, [None], [None], [side.product_dtype], [False]
        )
        result = outputs[1][0]
    elif side.problem.record.gathers:
        result = ops.fused_all_gather_matmul(x, [w], 0, name, return_A=False)[1][0]
    elif side.ones:
        shape = [side.problem.m, w.shape[1]]
        result = ops.fused_scaled_matmul_reduce_scatter(
            x, w, *side.ones, "sum", 0, 0, name, shape, out_dtype=side.product_dtype
        )
    else:
        result = ops.fused_matmul_reduce_scatter(x, w, "sum", 0, name)
    return result


def _one_shot(side: BenchSide, sample: int) -> CallResult:
    side.multiply(*side.factors(sample), side.symmetric)
    result: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(side.symmetric, "sum", side.setting.group.name)
    return result


def _two_shot(side: BenchSide, sample: int) -> CallResult:
    side.multiply(*side.factors(sample), side.symmetric)
    result: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_(side.symmetric, "sum", side.setting.group.name)
    return result


_BY_TORCH: dict[str, tuple[str, Callable[[BenchSide, int], CallResult]]] = {
    outside.TORCH_FUSED: ("torch: fused (symm_mem)", _fused),
    outside.TORCH_ONE_SHOT: ("torch: matmul, one-shot (symm_mem)", _one_shot),
    outside.TORCH_TWO_SHOT: ("torch: matmul, two-shot (symm_mem)", _two_shot),
}


def row_name(plan: str) -> str:
    """Return the name of a baseline's row, by its plan."""
    return plan.replace(".", "_")


TORCH = tuple(map(row_name, _BY_TORCH))
TORCH_FUSED = TORCH[0]


def call_of_plan(plan: str | None) -> Callable[[BenchSide, int], CallResult]:
    """Return the call of our operator with a named plan of the catalog, or (None) with the plan it chooses."""
    return lambda side, sample: side.ours(sample, plan)


def _of_plan(name: str, plan: str) -> BaselineMethod:
    return BaselineMethod(name, f"overweave, plan {plan}", call_of_plan(plan), plan=plan)


def _baseline(plan: str) -> BaselineMethod:
    """Return the row of a plan that the record of an operator names."""
    if plan not in _BY_TORCH:
        return _of_plan(row_name(plan), plan)
    label, by_torch = _BY_TORCH[plan]

    def call(side: BenchSide, sample: int) -> CallResult:
        return by_torch(side, sample) if side.is_bare else side.ours(sample, plan)

    def lacks(side: BenchSide) -> str:
        """Return why torch cannot run it. Of a bare product it scales fp8 itself, into `product_dtype`."""
        problem, product_dtype = side.problem, side.problem.result_dtype
        bare = replace(problem, epilogue=NO_EPILOGUE, dtype=product_dtype, out_dtype=None) if side.is_bare else problem
        return unmet(
            MethodRequest(bare, {}, target_of(side.setting.device, side.setting.group)),
            outside.OUTSIDE[plan].needs,
            "device",
        )

    return BaselineMethod(row_name(plan), label, call, lacks=lacks)


def methods_of(operator: str, plans: tuple[str, ...] = ()) -> tuple[BaselineMethod, ...]:
    """Return the rows of an operator. If plans are named, their rows replace those of ours."""
    baselines = [_baseline(plan) for plan in operator_of(operator).baselines]
    if not plans:
        return (*ROOFS, LIBRARY, *baselines, BaselineMethod(OURS, "overweave", call_of_plan(None)))
    named = (_of_plan(f"{NAMED}{plan}", plan) for plan in dict.fromkeys(plans))
    return (*ROOFS, LIBRARY, *(each for each in baselines if not each.plan), *named)
