"""Any operator on a problem, for whatever compares or tunes it: plan by plan, on local tensors."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist

from overweave.ir.epilogue import Z
from overweave.ir.problem import Problem
from overweave.ops.call.call import PRODUCTS, Beside, call
from overweave.ops.call.dispatch import Options, Weights
from overweave.ops.call.epilogue import Extras
from overweave.ops.call.norm import RmsNorm
from overweave.ops.call.scales import FP8
from overweave.tuner.measure.sides import OperatorCall
from overweave.tuner.measure.trial import Result


@lru_cache(maxsize=16)
def _ones(rows: int, cols: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, cols, dtype=torch.float32, device=device)


def _scaled(x: torch.Tensor, w: torch.Tensor) -> Extras | None:
    """fp8 operands are scaled by rows."""
    if x.dtype != FP8:
        return None
    return Extras(scale_x=_ones(x.shape[0], 1, x.device), scale_w=_ones(1, w.shape[1], x.device))


def _as_stored(part: torch.Tensor) -> torch.Tensor:
    """Columns of a weight, in its layout: of one stored as `[n, k]` they lie in a row."""
    return part if part.t().is_contiguous() else part.contiguous()


def operator_for(problem: Problem) -> OperatorCall:
    """The operator as it computes a problem with all that it has beside a bare product."""
    return _Call(problem)


class _Call:
    """An operator on a problem; what it takes beside x is made once for each weight that it is given.

    Of w, `[k, all multiplied columns]`, each of several weights takes its columns, and a gate the second half.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._made: dict[int, tuple[Weights, Beside]] = {}

    def __call__(self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, *, plan: str | None) -> Result:
        problem, key = self._problem, w.data_ptr()
        if key not in self._made:
            self._made[key] = self._beside(x, w, dist.get_rank(group))
        weights, beside = self._made[key]
        options: Options = {"m": problem.m, "return_gathered": False, "plan": plan}
        tensors = call(problem.record, x, weights if problem.columns else weights[0], group, options, beside)
        if problem.columns:
            return tuple([tensors[name] for name in PRODUCTS[: len(weights)]])
        return (tensors["y"], tensors[Z]) if problem.norm else tensors["y"]

    def _beside(self, x: torch.Tensor, w: torch.Tensor, rank: int) -> tuple[Weights, Beside]:
        problem, epilogue, norm = self._problem, self._problem.epilogue, self._problem.norm
        widths = problem.columns or (problem.n,) * epilogue.products
        weights = tuple(_as_stored(part) for part in w.split(widths, dim=1)) if len(widths) > 1 else (w,)
        extras = _scaled(x, w)
        if epilogue.of_sums.bits or epilogue.gate:
            extras = (extras or Extras())._replace(
                bias=self._random(x, 1)[0] if epilogue.bias else None,
                activation=epilogue.activation,
                residual=self._random(x, problem.result_rows(rank)) if epilogue.residual else None,
                gate=weights[1] if epilogue.gate else None,
            )
        if norm is None:
            return weights, (extras, None)
        residual = self._random(x, problem.m) if norm.residual else None
        return weights, (extras, RmsNorm(self._random(x, 1)[0].abs(), residual=residual, eps=norm.eps))

    def _random(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """`[rows, n]` in the dtype of the result, the same on every rank."""
        generator = torch.Generator(x.device).manual_seed(rows)
        dtype: torch.dtype = getattr(torch, self._problem.result_dtype)
        made = torch.randn(rows, self._problem.n, generator=generator, dtype=torch.float32, device=x.device)
        return made.to(dtype)
