"""A tensor of the gathered shape that is gathered at its first matmul, once for all that read it.

Attention reads `hidden_states.shape` before it projects, and calls query, key and value apart. The first projection
gathers while it multiplies; the others multiply what was gathered. Backward, their gradients meet in one sum of
matmuls that is scattered while it is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils import _pytree as pytree

from overweave.adapters.rows import gathered_by_library, scattered_by_library
from overweave.errors import InputError
from overweave.functional import all_gather_linear, linear_reduce_scatter

Maybe = torch.Tensor | None
Waiting = list[tuple[torch.Tensor, torch.Tensor]]  # gradients of products, with the weights that they belong to


class Gathering(torch.Tensor):
    """all_gather(shard, dim), not gathered yet. Whatever is not a shape, a dtype or a device gathers it.

    A matmul of overweave's styles asks `linear`. Every other function of torch gets the gathered tensor.
    """

    _shard: torch.Tensor
    _place: tuple[int, str]
    _whole: Maybe
    _waiting: Waiting

    @staticmethod
    def __new__(cls, shard: torch.Tensor, dim: int, group: str, ranks: int) -> Gathering:
        shape = list(shard.shape)
        shape[dim] *= ranks
        made: Gathering = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=shard.dtype, device=shard.device, requires_grad=shard.requires_grad
        )
        made._shard, made._place, made._whole, made._waiting = shard, (dim, group), None, []
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_THE_SHAPE:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        args, kwargs = pytree.tree_map_only(Gathering, Gathering.gathered, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Only what goes past `__torch_function__` comes here, where a gradient would be lost."""
        cure = "Read a `torch.Tensor` from it first: `x + 0`, or any other function of torch"
        raise InputError(f"{func} of a tensor that is not gathered yet", "torch functions are disabled around it", cure)

    def linear(self, weight: torch.Tensor, bias: Maybe) -> torch.Tensor:
        """linear(all_gather(shard), weight, bias), of local tensors: the first such call gathers."""
        y = None
        if self._whole is None:
            dim, group = self._place
            with torch.no_grad():
                y, values = all_gather_linear(self._shard, weight, bias, group, dim=dim, return_gathered=True)
            self._whole = _apply(_Gathered, self._shard, values, self._place, self._waiting)
        if not torch.is_grad_enabled():
            return linear(self._whole, weight, bias) if y is None else y
        product: torch.Tensor = _apply(_Multiplied, self._whole, weight, bias, y, self._waiting)
        return product

    def gathered(self) -> torch.Tensor:
        """The gathered tensor."""
        if self._whole is None:
            values = gathered_by_library(self._shard.detach(), *self._place)
            self._whole = _apply(_Gathered, self._shard, values, self._place, self._waiting)
        return self._whole


_PROPERTIES = ("shape", "dtype", "device", "ndim", "is_cuda", "is_cpu", "requires_grad", "layout")
_OF_THE_SHAPE = frozenset(
    (
        *(vars(torch._C.TensorBase)[name].__get__ for name in _PROPERTIES),
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
    )
)


class _Gathered(torch.autograd.Function):
    """The gathered values as a function of the shard."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, values: torch.Tensor, place: tuple[int, str], waiting: Waiting) -> Any:
        ctx.place, ctx.waiting = place, waiting
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *direct: Maybe) -> Any:
        (dim, group), products = ctx.place, list(ctx.waiting)
        ctx.waiting.clear()
        of_shard = None
        if products:
            of_ys, weights = [dy for dy, _ in products], [weight.t() for _, weight in products]
            of_shard = linear_reduce_scatter(of_ys, weights, group=group, dim=dim)
        if direct[0] is not None:  # of what read the gathered tensor without a matmul of ours
            own = scattered_by_library(direct[0], dim, group)
            of_shard = own if of_shard is None else of_shard + own
        return of_shard, None, None, None


class _Multiplied(torch.autograd.Function):
    """linear(whole, weight, bias), or its values, where they are known. Its gradient waits for those of the others."""

    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, weight: torch.Tensor, bias: Maybe, values: Maybe, waiting: Waiting
    ) -> torch.Tensor:
        ctx.waiting = waiting
        ctx.save_for_backward(whole, weight)
        return linear(whole, weight, bias) if values is None else values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_results: torch.Tensor) -> Any:
        (whole, weight), (of_y,), wanted = ctx.saved_tensors, of_results, ctx.needs_input_grad
        if wanted[0]:
            ctx.waiting.append((of_y, weight))
        rows = of_y.reshape(-1, of_y.shape[-1])
        of_weight = rows.t() @ whole.reshape(-1, whole.shape[-1]) if wanted[1] else None
        return None, of_weight, rows.sum(0) if wanted[2] else None, None, None


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)
