"""Gradients for torch's fused operators, which have none: that of a fused gather is a fused scatter, and conversely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from overweave.adapters.rows import as_rows, scattered_by_c10d
from overweave.compat.torch_names import AutoDispatchBelowAutograd, pytree
from overweave.errors import InputError
from overweave.ops.call.groups import group_of

OptionalTensor = torch.Tensor | None


class _Gather(torch.autograd.Function):
    """`fused_all_gather_matmul`. Returns (gathered input, None unless wants_gathered, *products)."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, dim: int, group: str, wants_gathered: bool, *bs: torch.Tensor) -> Any:
        with AutoDispatchBelowAutograd():
            gathered, ys = torch.ops.symm_mem.fused_all_gather_matmul(a, bs, dim, group, return_A=wants_gathered)
        ctx.dim_and_group = dim, group
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gathered, *bs)
        return gathered, *ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_gathered: OptionalTensor, *grad_ys: OptionalTensor) -> Any:
        (gathered, *bs), (dim, _), needs_grad = ctx.saved_tensors, ctx.dim_and_group, ctx.needs_input_grad
        grad_a = _grad_of_shard(grad_gathered, grad_ys, bs, ctx.dim_and_group) if needs_grad[0] else None
        grad_bs = [
            _grad_of_weight(gathered, dy, dim) if needs_grad[4 + index] and dy is not None else None
            for index, dy in enumerate(grad_ys)
        ]
        return grad_a, None, None, None, *grad_bs


class _Scatter(torch.autograd.Function):
    """`fused_matmul_reduce_scatter(a, b)`, with its gradients."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, reduce_op: str, dim: int, group: str) -> Any:
        with AutoDispatchBelowAutograd():
            y = torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, reduce_op, dim, group)
        ctx.dim_and_group = dim, group
        ctx.divisor = group_of(group).world_size if reduce_op == "avg" else 1
        ctx.save_for_backward(a, b)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> Any:
        """Return the gradients of a, by a fused gather of grad_y, and of b, by a local matmul."""
        (a, b), (dim, group), needs_grad = ctx.saved_tensors, ctx.dim_and_group, ctx.needs_input_grad
        grad_y = grad_y if ctx.divisor == 1 else grad_y / ctx.divisor
        gathered, (grad_a,) = torch.ops.symm_mem.fused_all_gather_matmul(
            grad_y, [b.t()], dim, group, return_A=needs_grad[1]
        )
        return (
            grad_a if needs_grad[0] else None,
            _grad_of_weight(a, gathered, dim) if needs_grad[1] else None,
            None,
            None,
            None,
        )


class _NoGradient(torch.autograd.Function):
    """Identity on the results of an operator without gradients; backward raises InputError."""

    @staticmethod
    def forward(ctx: Any, name: str, results: list[torch.Tensor], *_: torch.Tensor) -> Any:
        ctx.operator = name
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        cure = "Scale and multiply where gradients are defined, as a Float8Linear does, or run it under no_grad"
        raise InputError(f"differentiate symm_mem::{ctx.operator}", "it has no gradient", cure)


def gather(a: torch.Tensor, bs: list[torch.Tensor], dim: int, group: str, *, return_A: bool = True) -> Any:
    """Run `fused_all_gather_matmul`, differentiably. The gathered input is saved if a weight needs a gradient."""
    if not _is_differentiated(a, *bs):
        with AutoDispatchBelowAutograd():
            return torch.ops.symm_mem.fused_all_gather_matmul(a, bs, dim, group, return_A=return_A)
    wants_gathered = return_A or any(b.requires_grad for b in bs)
    gathered, *ys = _apply(_Gather, a, dim, group, wants_gathered, *bs)
    return gathered if return_A else None, ys


def scatter(a: torch.Tensor, b: torch.Tensor, reduce_op: str, dim: int, group: str) -> Any:
    """Run `fused_matmul_reduce_scatter`, differentiably."""
    if not _is_differentiated(a, b):
        with AutoDispatchBelowAutograd():
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, reduce_op, dim, group)
    return _apply(_Scatter, a, b, reduce_op, dim, group)


def without_gradient(name: str) -> Callable[..., Any]:
    """Return a kernel that runs the operator of that name, and whose results raise InputError in backward."""
    operator = getattr(torch.ops.symm_mem, name).default

    def call(*arguments: Any, **options: Any) -> Any:
        with AutoDispatchBelowAutograd():
            results = operator(*arguments, **options)
        inputs = pytree.tree_leaves((arguments, options))
        differentiated = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
        if not torch.is_grad_enabled() or not differentiated:
            return results
        if isinstance(results, torch.Tensor):
            return _apply(_NoGradient, name, [results], *differentiated)[0]
        return results[0], list(_apply(_NoGradient, name, results[1], *differentiated))

    return call


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


def _is_differentiated(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _grad_of_shard(
    grad_gathered: OptionalTensor,
    grad_ys: tuple[OptionalTensor, ...],
    bs: list[torch.Tensor],
    dim_and_group: tuple[int, str],
) -> OptionalTensor:
    """Return the gradient of the shard: this rank's rows of the sum over ranks of all `dy @ b.T` and grad_gathered.

    grad_gathered, grad_ys: gradients of the gathered input and of the products; None if not used.
    """
    dim, group = dim_and_group
    used = [(dy, b) for dy, b in zip(grad_ys, bs, strict=True) if dy is not None]
    grad_a = None
    if used:
        dy = used[0][0] if len(used) == 1 else torch.cat([dy for dy, _ in used], -1)
        b = used[0][1].t() if len(used) == 1 else torch.cat([b.t() for _, b in used])
        grad_a = torch.ops.symm_mem.fused_matmul_reduce_scatter(dy, b, "sum", dim, group)
    if grad_gathered is None:
        return grad_a
    direct = scattered_by_c10d(grad_gathered, dim, group)
    return direct if grad_a is None else grad_a + direct


def _grad_of_weight(a: torch.Tensor, dy: torch.Tensor, dim: int) -> torch.Tensor:
    """Return `a.T @ dy`, with `dim` leading in both."""
    return as_rows(a, dim).t() @ as_rows(dy, dim)
