"""Gradients of torch's fused operators, which have none in torch. Gather and reduce-scatter are each other's dual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from overweave.adapters.rows import as_rows, scattered_by_c10d
from overweave.compat.torch_names import AutoDispatchBelowAutograd, pytree
from overweave.errors import InputError
from overweave.ops.call.groups import group_of

Maybe = torch.Tensor | None


class _Gather(torch.autograd.Function):
    """`fused_all_gather_matmul`: the gathered input, if `wants_gathered`, and all products."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, dim: int, group: str, wants_gathered: bool, *bs: torch.Tensor) -> Any:
        with AutoDispatchBelowAutograd():
            gathered, ys = torch.ops.symm_mem.fused_all_gather_matmul(a, bs, dim, group, return_A=wants_gathered)
        ctx.place = dim, group
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gathered, *bs)
        return gathered, *ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_gathered: Maybe, *of_ys: Maybe) -> Any:
        (gathered, *bs), (dim, _), wanted = ctx.saved_tensors, ctx.place, ctx.needs_input_grad
        of_a = _grad_of_shard(of_gathered, of_ys, bs, ctx.place) if wanted[0] else None
        of_bs = [
            _grad_of_weight(gathered, dy, dim) if wanted[4 + index] and dy is not None else None
            for index, dy in enumerate(of_ys)
        ]
        return of_a, None, None, None, *of_bs


class _Scatter(torch.autograd.Function):
    """`fused_matmul_reduce_scatter`."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, reduce_op: str, dim: int, group: str) -> Any:
        with AutoDispatchBelowAutograd():
            y = torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, reduce_op, dim, group)
        ctx.place = dim, group
        ctx.divisor = group_of(group).world_size if reduce_op == "avg" else 1
        ctx.save_for_backward(a, b)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_y: torch.Tensor) -> Any:
        (a, b), (dim, group), wanted = ctx.saved_tensors, ctx.place, ctx.needs_input_grad
        of_y = of_y if ctx.divisor == 1 else of_y / ctx.divisor
        gathered, (of_a,) = torch.ops.symm_mem.fused_all_gather_matmul(of_y, [b.t()], dim, group, return_A=wanted[1])
        return of_a if wanted[0] else None, _grad_of_weight(a, gathered, dim) if wanted[1] else None, None, None, None


class _NoGradient(torch.autograd.Function):
    """The results of an operator without gradients: their backward raises InputError."""

    @staticmethod
    def forward(ctx: Any, name: str, results: list[torch.Tensor], *_: torch.Tensor) -> Any:
        ctx.operator = name
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        cure = "Scale and multiply where gradients are defined, as a Float8Linear does, or run it under no_grad"
        raise InputError(f"differentiate symm_mem::{ctx.operator}", "it has no gradient", cure)


def gather(a: torch.Tensor, bs: list[torch.Tensor], dim: int, group: str, *, return_A: bool = True) -> Any:
    """Run `fused_all_gather_matmul` with gradients. The gathered input is saved for those of weights."""
    if not _is_differentiated(a, *bs):
        with AutoDispatchBelowAutograd():
            return torch.ops.symm_mem.fused_all_gather_matmul(a, bs, dim, group, return_A=return_A)
    wants_gathered = return_A or any(b.requires_grad for b in bs)
    gathered, *ys = _apply(_Gather, a, dim, group, wants_gathered, *bs)
    return gathered if return_A else None, ys


def scatter(a: torch.Tensor, b: torch.Tensor, reduce_op: str, dim: int, group: str) -> Any:
    """Run `fused_matmul_reduce_scatter` with gradients."""
    if not _is_differentiated(a, b):
        with AutoDispatchBelowAutograd():
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, reduce_op, dim, group)
    return _apply(_Scatter, a, b, reduce_op, dim, group)


def refusing(name: str) -> Callable[..., Any]:
    """Return an operator on scaled operands, whose results raise InputError in backward."""
    operator = getattr(torch.ops.symm_mem, name).default

    def call(*arguments: Any, **options: Any) -> Any:
        with AutoDispatchBelowAutograd():
            made = operator(*arguments, **options)
        inputs = pytree.tree_leaves((arguments, options))
        differentiated = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
        if not torch.is_grad_enabled() or not differentiated:
            return made
        if isinstance(made, torch.Tensor):
            return _apply(_NoGradient, name, [made], *differentiated)[0]
        return made[0], list(_apply(_NoGradient, name, made[1], *differentiated))

    return call


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


def _is_differentiated(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _grad_of_shard(
    of_gathered: Maybe, of_ys: tuple[Maybe, ...], bs: list[torch.Tensor], place: tuple[int, str]
) -> Maybe:
    """Return the gradient of the shard: this rank's rows of the sum over ranks of `dy @ b.T` and `of_gathered`.

    of_gathered, of_ys: gradients of the gathered input and of the products.
    """
    dim, group = place
    live = [(dy, b) for dy, b in zip(of_ys, bs, strict=True) if dy is not None]
    of_a = None
    if live:
        dy = live[0][0] if len(live) == 1 else torch.cat([dy for dy, _ in live], -1)
        b = live[0][1].t() if len(live) == 1 else torch.cat([b.t() for _, b in live])
        of_a = torch.ops.symm_mem.fused_matmul_reduce_scatter(dy, b, "sum", dim, group)
    if of_gathered is None:
        return of_a
    direct = scattered_by_c10d(of_gathered, dim, group)
    return direct if of_a is None else of_a + direct


def _grad_of_weight(a: torch.Tensor, dy: torch.Tensor, dim: int) -> torch.Tensor:
    """Return `a.T @ dy`, with `dim` leading in both."""
    return as_rows(a, dim).t() @ as_rows(dy, dim)
