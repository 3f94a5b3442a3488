"""torch's fused operators as calls of overweave's: which calls are supported, and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from overweave.adapters.rows import GradientResults, as_before, as_rows, averaged
from overweave.adapters.symm_mem import obstacles, scaled
from overweave.ops.all_gather_matmul import all_gather_matmul
from overweave.ops.matmul_reduce_scatter import matmul_reduce_scatter


@dataclass(frozen=True)
class FusedOperator:
    """A fused operator of torch. Both functions take its arguments.

    obstacle: returns why overweave does not support a call, empty if it does. compute: returns the results in torch's
    order and shapes; their strides may differ.
    """

    name: str
    obstacle: Callable[..., str]
    compute: Callable[..., GradientResults]

    @property
    def operator(self) -> Any:
        """torch's operator."""
        return getattr(torch.ops.symm_mem, self.name).default


def _gather_obstacle(a: torch.Tensor, bs: Sequence[torch.Tensor], dim: int, group: str, **_: object) -> str:
    return obstacles.of_operands(a, bs, dim, group) or obstacles.of_dtype(a)


def _gather(a: torch.Tensor, bs: list[torch.Tensor], dim: int, group: str, *, return_A: bool = True) -> GradientResults:
    """Return the gathered input, None unless return_A, and all products."""
    if not return_A:
        return [None, *(as_before(y, a, dim) for y in all_gather_matmul(as_rows(a, dim), bs, group))]
    products, gathered = all_gather_matmul(as_rows(a, dim), bs, group, return_gathered=True)
    return [as_before(gathered, a, dim), *(as_before(y, a, dim) for y in products)]


def _scatter_obstacle(a: torch.Tensor, b: torch.Tensor, reduce_op: str, dim: int, group: str) -> str:
    found = obstacles.of_operands(a, [b], dim, group) or obstacles.of_dtype(a)
    return found or obstacles.of_sum(a.shape[dim], group, reduce_op, a.dtype)


def _scatter(a: torch.Tensor, b: torch.Tensor, reduce_op: str, dim: int, group: str) -> GradientResults:
    y = matmul_reduce_scatter(as_rows(a, dim), b, group)
    return [as_before(averaged(y, reduce_op, group), a, dim)]


FORMS = (
    FusedOperator("fused_all_gather_matmul", _gather_obstacle, _gather),
    FusedOperator("fused_matmul_reduce_scatter", _scatter_obstacle, _scatter),
    FusedOperator("fused_all_gather_scaled_matmul", scaled.gather_obstacle, scaled.gather),
    FusedOperator("fused_scaled_matmul_reduce_scatter", scaled.scatter_obstacle, scaled.scatter),
)
