"""The gradient of a gathered tensor that matmuls read: a sum over ranks that is scattered, if nobody reads it before.

Autograd adds the gradients that meet at a tensor. Of two sums over ranks that makes one, so that query, key and value
end in one sum of matmuls. A hook, or any other function of the gradient, gets the whole sum, which every rank then
computes: one `linear_all_reduce`.
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
    """dy @ weight, of the gradient of a result `[.., S, .., n]` and the weight `[n, k]`, this rank's part of a
    parameter. Raises InputError where the parameter was changed before the product is computed."""

    __slots__ = ("_parameter", "_version", "_weight", "dy")

    def __init__(self, dy: torch.Tensor, weight: torch.Tensor, parameter: torch.Tensor) -> None:
        self.dy, self._weight, self._parameter, self._version = dy, weight, parameter, version_of(parameter)

    @property
    def weight(self) -> torch.Tensor:
        """The weight, as the operators of gradients take it: `[k, n]`."""
        if version_of(self._parameter) != self._version:
            cure = (
                "Step the optimizer in a hook of the parameter that is registered before backward, or behind backward"
            )
            raise InputError("the gradient of a gathered input", "a weight was changed in place before it", cure)
        return self._weight.t()


Like = tuple[torch.Size, torch.dtype, torch.device]
_ADD = torch.ops.aten.add.Tensor


class Summing(Deferred):
    """all_reduce(sum of dy @ weight over products) + plain, not summed yet."""

    _gather: RowGather
    _products: tuple[WeightProduct, ...]
    _plain: torch.Tensor | None  # of readers that are no matmuls of ours: whole on every rank
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
            added = _added(*args)
            if added is not None:
                return added
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def is_unread(self) -> bool:
        """Whether nobody has its values, which may have been changed."""
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
        """Of one sum for each dtype: there are two where autocast was on for some matmuls."""
        found: dict[torch.dtype, list[WeightProduct]] = defaultdict(list)
        for each in self._products:
            found[each.dy.dtype].append(each)
        return [([each.dy for each in alike], [each.weight for each in alike]) for alike in found.values()]


def _added(one: Any, other: Any) -> Summing | None:
    """The sum of two gradients of one tensor, if that needs no values."""
    if not isinstance(one, Summing):
        one, other = other, one
    if not one.is_unread or not isinstance(other, torch.Tensor):
        return None
    like: Like = one.shape, one.dtype, one.device
    if (other.shape, other.dtype, other.device) != like:
        return None
    if not isinstance(other, Summing):
        return Summing(like, one._gather, one._products, _sum(one._plain, other))
    if not other.is_unread or other._gather != one._gather:
        return None
    return Summing(like, one._gather, one._products + other._products, _sum(one._plain, other._plain))


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _total(parts: list[torch.Tensor], dtype: torch.dtype, plain: torch.Tensor | None) -> torch.Tensor:
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total if plain is None else total + plain
