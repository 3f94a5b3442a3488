"""The operators behind one face, for whatever compares or tunes them: plan by plan, on local tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from overweave.ir.plan import Problem
from overweave.ops.all_gather_matmul import all_gather_matmul
from overweave.ops.epilogue import Extras
from overweave.ops.matmul_all_reduce import matmul_all_reduce
from overweave.ops.matmul_reduce_scatter import matmul_reduce_scatter
from overweave.ops.norm import RmsNorm
from overweave.ops.scales import FP8
from overweave.tuner.attempt import Result
from overweave.tuner.sides import OperatorCall


@lru_cache(maxsize=16)
def _ones(rows: int, cols: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, cols, dtype=torch.float32, device=device)


def _extras(x: torch.Tensor, w: torch.Tensor) -> Extras | None:
    """fp8 operands are scaled by rows."""
    if x.dtype != FP8:
        return None
    return Extras(scale_x=_ones(x.shape[0], 1, x.device), scale_w=_ones(1, w.shape[1], x.device))


def _as_stored(part: torch.Tensor) -> torch.Tensor:
    """Columns of a weight, in its layout: of one stored as `[n, k]` they lie in a row."""
    return part if part.t().is_contiguous() else part.contiguous()


OPERATORS: dict[str, OperatorCall] = {
    "all_gather_matmul": lambda x, w, group, *, m, plan: all_gather_matmul(
        x, w, group, m=m, extras=_extras(x, w), plan=plan
    ),
    "matmul_reduce_scatter": lambda x, w, group, *, m, plan: matmul_reduce_scatter(
        x, w, group, extras=_extras(x, w), plan=plan
    ),
    "matmul_all_reduce": lambda x, w, group, *, m, plan: matmul_all_reduce(
        x, w, group, extras=_extras(x, w), plan=plan
    ),
}


def operator_for(problem: Problem) -> OperatorCall:
    """The operator as it computes a problem with all that it has beside a bare product."""
    return _Dressed(problem)


class _Beside(NamedTuple):
    """What a call takes beside x: its weights, extras and norm."""

    weights: list[torch.Tensor]
    extras: Extras | None
    norm: RmsNorm | None


class _Dressed:
    """An operator with all that a problem has beside a bare product, made once for each weight that it is given.

    Of w, `[k, all multiplied columns]`, each of several weights takes its columns, and a gate the second half.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._made: dict[int, _Beside] = {}

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, *, m: int, plan: str | None
    ) -> Result:
        if w.data_ptr() not in self._made:
            self._made[w.data_ptr()] = self._beside(x, w, dist.get_rank(group))
        weights, extras, norm = self._made[w.data_ptr()]
        if norm is not None:
            return matmul_all_reduce(x, w, group, extras=extras, norm=norm, plan=plan)
        if self._problem.operator == "matmul_all_reduce":
            return matmul_all_reduce(x, w, group, extras=extras, plan=plan)
        if self._problem.operator == "matmul_reduce_scatter":
            return matmul_reduce_scatter(x, w, group, extras=extras, plan=plan)
        if self._problem.columns:
            return all_gather_matmul(x, weights, group, m=m, extras=extras, plan=plan)
        return all_gather_matmul(x, weights[0], group, m=m, extras=extras, plan=plan)

    def _beside(self, x: torch.Tensor, w: torch.Tensor, rank: int) -> _Beside:
        problem, epilogue, norm = self._problem, self._problem.epilogue, self._problem.norm
        widths = problem.columns or (problem.n,) * (2 if epilogue.gate else 1)
        weights = [_as_stored(part) for part in w.split(widths, dim=1)] if len(widths) > 1 else [w]
        scaled = _extras(x, w) or Extras()
        extras = scaled._replace(
            bias=self._random(x, 1)[0] if epilogue.bias else None,
            activation=epilogue.activation,
            residual=self._random(x, problem.result_rows(rank)) if epilogue.residual else None,
            gate=weights[1] if epilogue.gate else None,
        )
        if norm is None:
            return _Beside(weights, extras, None)
        residual = self._random(x, problem.m) if norm.residual else None
        weight = self._random(x, 1)[0].abs()
        return _Beside(weights, _extras(x, w), RmsNorm(weight, residual=residual, eps=norm.eps))

    def _random(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """`[rows, n]` in the dtype of the result, the same on every rank."""
        generator = torch.Generator(x.device).manual_seed(rows)
        dtype: torch.dtype = getattr(torch, self._problem.result_dtype)
        made = torch.randn(rows, self._problem.n, generator=generator, dtype=torch.float32, device=x.device)
        return made.to(dtype)
