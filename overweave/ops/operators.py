"""The operators behind one face, for whatever compares or tunes them: plan by plan, on local tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.distributed as dist

from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ops.all_gather_matmul import all_gather_matmul
from overweave.ops.epilogue import Extras
from overweave.ops.matmul_all_reduce import matmul_all_reduce
from overweave.ops.matmul_reduce_scatter import matmul_reduce_scatter
from overweave.tuner.sides import OperatorCall


@lru_cache(maxsize=16)
def _ones(rows: int, cols: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, cols, device=device)


def _scaled_all_gather_matmul(
    x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, *, m: int, plan: str | None
) -> torch.Tensor:
    """fp8 operands, scaled by rows."""
    extras = Extras(scale_x=_ones(x.shape[0], 1, x.device), scale_w=_ones(1, w.shape[1], x.device))
    return all_gather_matmul(x, w, group, m=m, extras=extras, plan=plan)


OPERATORS: dict[str, OperatorCall] = {
    "all_gather_matmul": lambda x, w, group, *, m, plan: all_gather_matmul(x, w, group, m=m, plan=plan),
    "matmul_reduce_scatter": lambda x, w, group, *, m, plan: matmul_reduce_scatter(x, w, group, plan=plan),
    "matmul_all_reduce": lambda x, w, group, *, m, plan: matmul_all_reduce(x, w, group, plan=plan),
}
SCALED: dict[str, OperatorCall] = {"all_gather_matmul": _scaled_all_gather_matmul}


def operators_on(dtype: Dtype) -> Mapping[str, OperatorCall]:
    """The operators that take operands of a dtype."""
    return SCALED if dtype == FLOAT8 else OPERATORS
