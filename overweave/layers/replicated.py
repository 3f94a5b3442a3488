"""Column-parallel layers whose input is whole on every rank: nothing moves forward, and the gradient is summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from overweave.errors import InputError
from overweave.functional import check_untransformed, is_transformed, linear_all_reduce
from overweave.layers.precision import cast, is_autocast
from overweave.memory.group import GroupLike
from overweave.ops.dispatch.route import place_of, refused

Maybe = torch.Tensor | None


class _Replicated(torch.autograd.Function):
    """`linear(x, weight, bias)`, where every rank has its rows of the whole weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, group: str) -> torch.Tensor:
        wanted = ctx.needs_input_grad
        ctx.group = group
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if wanted[1] else None, weight if wanted[0] else None)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *of_results: Maybe) -> Any:
        (x, weight), of_y, wanted = ctx.saved_tensors, of_results[0], ctx.needs_input_grad
        if of_y is None:
            return None, None, None, None
        if torch.is_grad_enabled():
            raise differentiated_twice("replicated_linear", ctx.group)
        of_x = linear_all_reduce(of_y, weight.t(), group=ctx.group) if wanted[0] else None
        return of_x, *gradients_of_weights(of_y, x, wanted[1:3]), None


def replicated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: Maybe = None, group: GroupLike = None
) -> torch.Tensor:
    """y = linear(x, weight, bias), of which every rank has its columns; x is the same on every rank.

    x: `[.., k]`. weight: `[n/W, k]`. Returns `[.., n/W]`. The gradient of x is the sum over ranks, by
    `linear_all_reduce`: the dual of that operator, and equal on all ranks as x is. Its ranks wait for each other in the
    backward pass only. Raises what the operator raises.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return linear(x, weight, bias)
    if is_transformed():
        check_untransformed("replicated_linear", group, (x, weight))
    if is_autocast():
        x, weight, bias = cast(x), cast(weight), cast(bias)
    y: torch.Tensor = _apply(_Replicated, x, weight, bias, place_of(group).name)
    return y


def gradients_of_weights(of_y: torch.Tensor, x: Maybe, wanted: Sequence[bool]) -> tuple[Maybe, Maybe]:
    """Of the weight and of the bias of `linear(x, weight, bias)`, if they are wanted: local matmuls."""
    rows = of_y.reshape(-1, of_y.shape[-1])
    of_weight = rows.t() @ x.reshape(-1, x.shape[-1]).to(rows.dtype) if wanted[0] and x is not None else None
    return of_weight, rows.sum(0) if wanted[1] else None


def differentiated_twice(name: str, group: str) -> Exception:
    """The error, known to every rank, where backward is asked for a graph of itself."""
    cure = "Leave out create_graph=True; gradients of gradients are not computed"
    return refused(group, InputError(f"differentiate {name} twice", "backward is asked for a graph", cure))


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)
