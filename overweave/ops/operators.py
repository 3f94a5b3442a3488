"""Any operator on a problem, for whatever compares or tunes it: plan by plan, on local tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from overweave.ir.operators.forms import GATE, NORM_WEIGHT, SCALE_W, SCALE_X
from overweave.ir.problem import Problem
from overweave.ops.call.operands import CallArguments
from overweave.ops.dispatch.call import call
from overweave.ops.dispatch.schema import PRODUCTS
from overweave.tuner.measure.baselines import OperatorCall
from overweave.tuner.measure.trial import CallResult


def operator_for(problem: Problem) -> OperatorCall:
    """The operator as it computes a problem with all that it has beside a bare product."""
    return _Call(problem)


class _Call:
    """An operator on a problem; what it takes beside x is made once for each weight that it is given.

    Of w, `[k, all multiplied columns]`, each of several weights takes its columns, and a gate the second half.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._made: dict[int, tuple[list[torch.Tensor], CallArguments]] = {}

    def __call__(self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, *, plan: str | None) -> CallResult:
        problem, key = self._problem, w.data_ptr()
        if key not in self._made:
            self._made[key] = self._beside(x, w, dist.get_rank(group))
        weights, given = self._made[key]
        operand = weights if problem.columns else weights[0]
        tensors = call(problem.record, group, {"x": x, "w": operand, **given, "plan": plan})
        if problem.columns:
            return tuple([tensors[name] for name in PRODUCTS[: len(weights)]])
        made = [tensors[name] for name in problem.also_made]
        return (tensors["y"], *made) if made else tensors["y"]

    def _beside(self, x: torch.Tensor, w: torch.Tensor, rank: int) -> tuple[list[torch.Tensor], CallArguments]:
        problem, epilogue = self._problem, self._problem.epilogue
        widths = problem.columns or (problem.n,) * epilogue.products
        weights = [_as_stored(part) for part in w.split(widths, dim=1)] if len(widths) > 1 else [w]
        given: CallArguments = {"activation": epilogue.activation} if epilogue.activation else {}
        for name in problem.beside:
            made = weights[1] if name == GATE else _made(problem.operand(name, rank), x.device)
            given[name] = made[0] if problem.is_vector(name) else made
        if epilogue.scaling:  # fp8 operands are scaled by rows
            given[SCALE_X] = torch.ones(x.shape[0], 1, dtype=torch.float32, device=x.device)
            given[SCALE_W].fill_(1)
        if NORM_WEIGHT in given:
            given[NORM_WEIGHT] = given[NORM_WEIGHT].abs()
        given |= problem.numbers
        if problem.record.has_row_shards:
            given["m"] = problem.m
        return weights, given


def _made(operand: tuple[int, int, str], device: torch.device) -> torch.Tensor:
    """A matrix of normal numbers, the same on every rank."""
    rows, cols, dtype = operand
    generator = torch.Generator(device).manual_seed(rows)
    made = torch.randn(rows, cols, generator=generator, dtype=torch.float32, device=device)
    return made.to(getattr(torch, dtype))


def _as_stored(part: torch.Tensor) -> torch.Tensor:
    """Columns of a weight, in its layout: of one stored as `[n, k]` they lie in a row."""
    return part if part.t().is_contiguous() else part.contiguous()
