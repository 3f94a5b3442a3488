"""The operators behind one face, for whatever compares or tunes them: plan by plan, on local tensors."""

from __future__ import annotations

from functools import lru_cache

import torch

from overweave.ops.all_gather_matmul import all_gather_matmul
from overweave.ops.epilogue import Extras
from overweave.ops.matmul_all_reduce import matmul_all_reduce
from overweave.ops.matmul_reduce_scatter import matmul_reduce_scatter
from overweave.ops.scales import FP8
from overweave.tuner.sides import OperatorCall


@lru_cache(maxsize=16)
def _ones(rows: int, cols: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, cols, device=device)


def _extras(x: torch.Tensor, w: torch.Tensor) -> Extras | None:
    """fp8 operands are scaled by rows."""
    if x.dtype != FP8:
        return None
    return Extras(scale_x=_ones(x.shape[0], 1, x.device), scale_w=_ones(1, w.shape[1], x.device))


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
