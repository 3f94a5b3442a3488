"""Column-parallel layers with a replicated input: no communication forward; the gradient is all-reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch.nn.functional import linear

from overweave.compat.torch_names import is_any_autocast_enabled
from overweave.functional import check_untransformed, is_transformed, linear_all_reduce
from overweave.memory.group import GroupLike
from overweave.ops.dispatch.collectives import exchange_in, replicated
from overweave.ops.dispatch.route import group_rank_of

_CAST = (torch.bfloat16, torch.float16, torch.float32)  # neither fp64 nor fp8
is_autocast: Callable[[], bool] = is_any_autocast_enabled  # on any device: a cheap check before `cast`


def autocast_dtype(operand: torch.Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts an operand of `torch.nn.functional.linear`; None if it does not."""
    device = operand.device.type
    if operand.dtype not in _CAST or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


@overload
def cast(operand: torch.Tensor) -> torch.Tensor: ...
@overload
def cast(operand: torch.Tensor | None) -> torch.Tensor | None: ...
def cast(operand: torch.Tensor | None) -> torch.Tensor | None:
    """Cast an operand as autocast does for `torch.nn.functional.linear`."""
    dtype = None if operand is None else autocast_dtype(operand)
    return operand if operand is None or dtype is None else operand.to(dtype)


OptionalTensor = torch.Tensor | None


class _Replicated(torch.autograd.Function):
    """`linear(x, weight, bias)` with this rank's rows of the weight; the gradient of x is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: OptionalTensor, group: str) -> torch.Tensor:
        needs_grad = ctx.needs_input_grad
        ctx.group = group
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if needs_grad[1] else None, weight if needs_grad[0] else None)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: OptionalTensor) -> Any:
        (x, weight), grad_y, needs_grad = ctx.saved_tensors, grads[0], ctx.needs_input_grad
        if grad_y is None:
            return None, None, None, None
        if torch.is_grad_enabled() and x is not None:  # so that a gradient of this gradient is summed over ranks
            x = replicated(exchange_in(ctx.group, "replicated_linear"), x)
        grad_x = linear_all_reduce(grad_y, weight.t(), group=ctx.group) if needs_grad[0] else None
        return grad_x, *weight_gradients(grad_y, x, needs_grad[1:3]), None


def replicated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: OptionalTensor = None, group: GroupLike = None
) -> torch.Tensor:
    """Return linear(x, weight, bias): this rank's columns of the result. x is the same on every rank.

    x: `[.., k]`. weight: `[n/W, k]`. Returns `[.., n/W]`. `linear_all_reduce` sums the gradient of x over ranks, so it
    is equal on all of them. Ranks communicate in the backward pass only. Raises what `linear_all_reduce` raises.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return linear(x, weight, bias)
    if is_transformed():
        check_untransformed("replicated_linear", group, (x, weight))
    if is_autocast():
        x, weight, bias = cast(x), cast(weight), cast(bias)
    y: torch.Tensor = _apply(_Replicated, x, weight, bias, group_rank_of(group).name)
    return y


def weight_gradients(
    grad_y: torch.Tensor, x: OptionalTensor, needs_grad: Sequence[bool]
) -> tuple[OptionalTensor, OptionalTensor]:
    """Return the gradients of weight and bias of `linear(x, weight, bias)`, by local matmuls; None if not needed.

    needs_grad: of (weight, bias).
    """
    rows = grad_y.reshape(-1, grad_y.shape[-1])
    grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]).to(rows.dtype) if needs_grad[0] and x is not None else None
    return grad_weight, rows.sum(0) if needs_grad[1] else None


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)
