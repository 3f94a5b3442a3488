"""Tensors of any rank as the matrices that operators take, and their results as tensors again."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from overweave.errors import InputError
from overweave.ir.operators.record import Operator
from overweave.ir.shards import shard_rows
from overweave.ops.dispatch.route import GroupRank, refused

Where = tuple[Operator, GroupRank]  # what is called, and this rank's place in its group


class RowLayout(NamedTuple):
    """The rows of x as a matrix, and how rows of the result become a tensor again.

    m: all rows, where ranks have unlike numbers. lead, inner: the product of the dimensions before and behind `dim`.
    parts: of `dim`, each of `most`, in the order in which the result has them before `lead`; 0: they are in order.
    shape: of the result, but for its last dimension. kept: how much of `dim` is no padding. is_padded: on any rank.
    """

    matrix: torch.Tensor
    shape: tuple[int, ...]
    m: int | None = None
    lead: int = 1
    inner: int = 1
    parts: int = 0
    most: int = 0
    kept: int = 0
    is_padded: bool = False

    @property
    def is_in_order(self) -> bool:
        """Whether rows of the result are those of the tensor that is returned, on every rank."""
        return self.parts == 0 or (self.parts == 1 and not self.is_padded)

    def arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a scatter: rows of a tensor that lie as those that `restored` returns, as those of the result."""
        if self.parts == 0 or not self.is_padded:
            return matrix_of(tensor)
        columns = tensor.shape[-1]
        parted = tensor.reshape(self.lead, self.kept, self.inner, columns)
        return matrix_of(torch.nn.functional.pad(parted, (0, 0, 0, 0, 0, self.most - self.kept)))

    def restored(self, result: torch.Tensor) -> torch.Tensor:
        """The result, contiguous."""
        if not self.parts and len(self.shape) == 1:
            return result
        columns = result.shape[-1]
        if self.parts:
            parted = result.view(self.parts, self.lead, self.most, self.inner, columns).transpose(0, 1)
            whole = parted.reshape(self.lead, self.parts * self.most, self.inner, columns)
            result = whole[:, : self.kept].contiguous()
        return result.view(*self.shape, columns)


def matrix_of(x: torch.Tensor) -> torch.Tensor:
    """All rows of a tensor, one below the other."""
    if x.dim() == 2:
        return x.contiguous()
    return x.reshape(prod(x.shape[:-1]), x.shape[-1]).contiguous()


def _dimension(where: Where, x: torch.Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim() - 1 or dim == -1:
        found = f"got dim={dim} of x {list(x.shape)}"
        raise _refusal(where, "dim, any but the last", found, "Features are multiplied: name a dimension of rows")
    return dim % x.dim()


def gathered_rows(where: Where, x: torch.Tensor, dim: int, size: int | None) -> RowLayout:
    """The rows of a shard that is gathered along `dim`. size: where ranks have unlike numbers. Raises InputError."""
    if x.dim() == 2 and dim == 0 and size is None:
        return RowLayout(x.contiguous(), (x.shape[0] * where[1].world_size,))
    dim, ranks = _dimension(where, x, dim), where[1].world_size
    own, before, behind = x.shape[dim], x.shape[:dim], x.shape[dim + 1 : -1]
    whole = own * ranks if size is None else size
    if size is not None:
        lo, hi = shard_rows(whole, ranks, where[1].rank)
        if hi - lo != own:
            found = f"rank {where[1].rank} of {ranks} holds {own} of {whole}, not {hi - lo}"
            raise _refusal(where, f"size={size} along dim {dim}", found, "Deal x as torch.chunk does, or pass size")
    shape, lead, inner = (*before, whole, *behind), prod(before), prod(behind)
    is_even = size is None or whole % ranks == 0
    if lead == 1 and (is_even or inner == 1):
        return RowLayout(matrix_of(x), shape, None if is_even else whole)
    most = own if is_even else -(-whole // ranks)
    return RowLayout(matrix_of(_padded(x, dim, most)), shape, None, lead, inner, ranks, most, whole)


def scattered_rows(where: Where, x: torch.Tensor, dim: int) -> RowLayout:
    """The rows of a product that is scattered along `dim`. Raises InputError."""
    dim, ranks = _dimension(where, x, dim), where[1].world_size
    whole, before, behind = x.shape[dim], x.shape[:dim], x.shape[dim + 1 : -1]
    lead, inner, is_even = prod(before), prod(behind), whole % ranks == 0
    if is_even:
        own = most = whole // ranks
    else:
        lo, hi = shard_rows(whole, ranks, where[1].rank)
        own, most = hi - lo, -(-whole // ranks)
    shape = (*before, own, *behind)
    if lead == 1 and (is_even or inner == 1):
        return RowLayout(matrix_of(x), shape)
    parted = _padded(x, dim, ranks * most).reshape(lead, ranks, most * inner, x.shape[-1]).transpose(0, 1)
    matrix = matrix_of(parted.reshape(ranks * lead * most * inner, x.shape[-1]))
    return RowLayout(matrix, shape, None, lead, inner, 1, most, own, not is_even)


def _padded(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """x with rows of zeros behind those along `dim`."""
    missing = length - x.shape[dim]
    return x if missing == 0 else torch.nn.functional.pad(x, (*[0, 0] * (x.dim() - 1 - dim), 0, missing))


def _refusal(where: Where, asked: str, found: str, cure: str) -> Exception:
    operator, place = where
    return refused(place.name, InputError(f"{operator.name}: {asked}", found, cure))
