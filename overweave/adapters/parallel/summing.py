"""The lazy gradient of a gathered tensor: a sum over ranks of matmuls, reduce-scattered unless it is read before.

Autograd adds the gradients of a tensor. Adding two lazy sums makes one, so that query, key and value end in one sum of
matmuls. A hook, or any other reader of the gradient, gets the whole sum on every rank, by one `linear_all_reduce`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from overweave.adapters.parallel.deferred import Deferred, version_of
from overweave.adapters.rows import RowGather
from overweave.compat.torch_names import make_wrapper_subclass
from overweave.errors import InputError
from overweave.functional import linear_all_reduce, linear_reduce_scatter


class WeightProduct:
    """A lazy dy @ weight: dy is `[.., S, .., n]`, the weight this rank's shard `[n, k]` of a parameter. Raises
    InputError if the parameter is changed in place before the product is computed."""

    __slots__ = ("_parameter", "_version", "_weight", "dy")

    def __init__(self, dy: torch.Tensor, weight: torch.Tensor, parameter: torch.Tensor) -> None:
        self.dy, self._weight, self._parameter, self._version = dy, weight, parameter, version_of(parameter)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as the gradient operators take it: `[k, n]`."""
        if version_of(self._parameter) != self._version:
            cure = (
                "Step the optimizer in a hook of the parameter that is registered before backward, or behind backward"
            )
            raise InputError("the gradient of a gathered input", "a weight was changed in place before it", cure)
        return self._weight.t()


Like = tuple[torch.Size, torch.dtype, torch.device]
_ADD = torch.ops.aten.add.Tensor


class Summing(Deferred):
    """A lazy all_reduce(sum of dy @ weight over products) + plain."""

    _gather: RowGather
    _products: tuple[WeightProduct, ...]
    _plain: torch.Tensor | None  # gradient from other readers, whole on every rank
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, like: Like, gather: RowGather, products: tuple[WeightProduct, ...], plain: torch.Tensor | None = None
    ) -> Summing:
        """like: shape, dtype and device of the gathered tensor."""
        made: Summing = make_wrapper_subclass(cls, like[0], dtype=like[1], device=like[2])
        made._gather, made._products, made._plain, made._whole = gather, products, plain, None
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is _ADD and not kwargs and len(args) == 2:
            added = _merge(*args)
            if added is not None:
                return added
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def is_unread(self) -> bool:
        """Whether its values were never read, and so never changed."""
        return self._whole is None

    def computed(self, reader: str) -> torch.Tensor:
        """The whole sum, the same on every rank."""
        if self._whole is None:
            parts = [linear_all_reduce(*factors, group=self._gather.group) for factors in self._factors()]
            self._whole = _total(parts, self.dtype, self._plain)
        return self._whole

    def scattered(self) -> torch.Tensor:
        """This rank's rows of the sum."""
        dim, group = self._gather.dim, self._gather.group
        parts = [linear_reduce_scatter(*factors, group=group, dim=dim) for factors in self._factors()]
        return _total(parts, self.dtype, None if self._plain is None else self._gather.own(self._plain))

    def _factors(self) -> list[tuple[Any, Any]]:
        """Return ([dy], [weight]) for each dtype: there are two if autocast was on for some matmuls only."""
        by_dtype: dict[torch.dtype, list[WeightProduct]] = defaultdict(list)
        for product in self._products:
            by_dtype[product.dy.dtype].append(product)
        return [
            ([product.dy for product in products], [product.weight for product in products])
            for products in by_dtype.values()
        ]


def _merge(one: Any, other: Any) -> Summing | None:
    """Return the lazy sum of two gradients; None if their values are needed."""
    if not isinstance(one, Summing):
        one, other = other, one
    if not one.is_unread or not isinstance(other, torch.Tensor):
        return None
    like: Like = one.shape, one.dtype, one.device
    if (other.shape, other.dtype, other.device) != like:
        return None
    if not isinstance(other, Summing):
        return Summing(like, one._gather, one._products, _add_optional(one._plain, other))
    if not other.is_unread or other._gather != one._gather:
        return None
    return Summing(like, one._gather, one._products + other._products, _add_optional(one._plain, other._plain))


def _add_optional(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _total(parts: list[torch.Tensor], dtype: torch.dtype, plain: torch.Tensor | None) -> torch.Tensor:
    """Add parts in `dtype`, and `plain`."""
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total if plain is None else total + plain
