"""Column-parallel layers whose input is whole on every rank: nothing moves forward, and the gradient is summed."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from overweave.functional import linear_all_reduce
from overweave.memory.group import GroupLike, process_group_of


class _Replicated(torch.autograd.Function):
    """`linear(x, weight)`, where every rank has its rows of the whole weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_results: torch.Tensor) -> Any:
        (x, weight), (of_y,) = ctx.saved_tensors, of_results
        of_x = linear_all_reduce(of_y, weight.t(), group=ctx.group) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = of_y.reshape(-1, of_y.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return of_x, of_weight, None


def replicated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, group: GroupLike = None
) -> torch.Tensor:
    """y = linear(x, weight, bias), of which every rank has its columns; x is the same on every rank.

    x: `[.., k]`. weight: `[n/W, k]`. Returns `[.., n/W]`. The gradient of x is the sum over ranks, by
    `linear_all_reduce`: the dual of that operator, and equal on all ranks as x is. Its ranks wait for each other in the
    backward pass only. Raises what the operator raises.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return linear(x, weight, bias)
    y: torch.Tensor = _apply(_Replicated, x, weight, process_group_of(group).group_name)
    return y if bias is None else y + bias


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)
