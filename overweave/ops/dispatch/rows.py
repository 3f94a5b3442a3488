"""Views tensors of any number of dimensions as the matrices that operators take, and their results as tensors again."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from overweave.errors import InputError
from overweave.ir.operators.record import Operator
from overweave.ir.shards import shard_rows
from overweave.ops.dispatch.route import GroupRank, refused

Where = tuple[Operator, GroupRank]  # the operator that is called, this rank in its group


class RowLayout(NamedTuple):
    """x as a matrix of rows, and how rows of the result become a tensor again.

    m: rows of all ranks, if shards are uneven. lead, inner: products of the dimensions before and after `dim`. parts:
    of `dim`, of `padded_rows` each, that stand before `lead` in the result's row order; 0: rows are in order. shape:
    of the result, without its last dimension. valid_rows: of `dim`, without padding. is_padded: on any rank.
    """

    matrix: torch.Tensor
    shape: tuple[int, ...]
    m: int | None = None
    lead: int = 1
    inner: int = 1
    parts: int = 0
    padded_rows: int = 0
    valid_rows: int = 0
    is_padded: bool = False

    @property
    def is_in_order(self) -> bool:
        """Return whether the result's rows are those of the returned tensor, in order, on every rank."""
        return self.parts == 0 or (self.parts == 1 and not self.is_padded)

    def arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder the rows of a tensor like `restored`'s result, of a scatter, into the result's order, padded."""
        if self.parts == 0 or not self.is_padded:
            return matrix_of(tensor)
        columns = tensor.shape[-1]
        parts_view = tensor.reshape(self.lead, self.valid_rows, self.inner, columns)
        return matrix_of(torch.nn.functional.pad(parts_view, (0, 0, 0, 0, 0, self.padded_rows - self.valid_rows)))

    def restored(self, result: torch.Tensor) -> torch.Tensor:
        """Reshape the result to the returned tensor, contiguous, without padding."""
        if not self.parts and len(self.shape) == 1:
            return result
        columns = result.shape[-1]
        if self.parts:
            parts_view = result.view(self.parts, self.lead, self.padded_rows, self.inner, columns).transpose(0, 1)
            whole = parts_view.reshape(self.lead, self.parts * self.padded_rows, self.inner, columns)
            result = whole[:, : self.valid_rows].contiguous()
        return result.view(*self.shape, columns)


def matrix_of(x: torch.Tensor) -> torch.Tensor:
    """Flatten all dimensions but the last: a contiguous matrix."""
    if x.dim() == 2:
        return x.contiguous()
    return x.reshape(prod(x.shape[:-1]), x.shape[-1]).contiguous()


def _dimension(where: Where, x: torch.Tensor, dim: int) -> int:
    """Return `dim` as non-negative. Raises InputError for the last dimension, which is multiplied, and beyond."""
    if not -x.dim() <= dim < x.dim() - 1 or dim == -1:
        found = f"got dim={dim} of x {list(x.shape)}"
        raise _refusal(where, "dim, any but the last", found, "Features are multiplied: name a dimension of rows")
    return dim % x.dim()


def gathered_rows(where: Where, x: torch.Tensor, dim: int, size: int | None) -> RowLayout:
    """Return the row layout of a shard that is gathered along `dim`. size: its whole extent, if shards are uneven.

    Raises InputError.
    """
    if x.dim() == 2 and dim == 0 and size is None:
        return RowLayout(x.contiguous(), (x.shape[0] * where[1].world_size,))
    dim, ranks = _dimension(where, x, dim), where[1].world_size
    own, lead_dims, inner_dims = x.shape[dim], x.shape[:dim], x.shape[dim + 1 : -1]
    total = own * ranks if size is None else size
    if size is not None:
        lo, hi = shard_rows(total, ranks, where[1].rank)
        if hi - lo != own:
            found = f"rank {where[1].rank} of {ranks} holds {own} of {total}, not {hi - lo}"
            raise _refusal(where, f"size={size} along dim {dim}", found, "Deal x as torch.chunk does, or pass size")
    shape, lead, inner = (*lead_dims, total, *inner_dims), prod(lead_dims), prod(inner_dims)
    is_even = size is None or total % ranks == 0
    if lead == 1 and (is_even or inner == 1):
        return RowLayout(matrix_of(x), shape, None if is_even else total)
    padded_rows = own if is_even else -(-total // ranks)
    return RowLayout(matrix_of(_padded(x, dim, padded_rows)), shape, None, lead, inner, ranks, padded_rows, total)


def scattered_rows(where: Where, x: torch.Tensor, dim: int) -> RowLayout:
    """Return the row layout of a product that is scattered along `dim`. Raises InputError."""
    dim, ranks = _dimension(where, x, dim), where[1].world_size
    total, lead_dims, inner_dims = x.shape[dim], x.shape[:dim], x.shape[dim + 1 : -1]
    lead, inner, is_even = prod(lead_dims), prod(inner_dims), total % ranks == 0
    if is_even:
        own = padded_rows = total // ranks
    else:
        lo, hi = shard_rows(total, ranks, where[1].rank)
        own, padded_rows = hi - lo, -(-total // ranks)
    shape = (*lead_dims, own, *inner_dims)
    if lead == 1 and (is_even or inner == 1):
        return RowLayout(matrix_of(x), shape)
    parted = _padded(x, dim, ranks * padded_rows).reshape(lead, ranks, padded_rows * inner, x.shape[-1]).transpose(0, 1)
    matrix = matrix_of(parted.reshape(ranks * lead * padded_rows * inner, x.shape[-1]))
    return RowLayout(matrix, shape, None, lead, inner, 1, padded_rows, own, not is_even)


def _padded(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return x padded with zeros to `length` along `dim`."""
    missing = length - x.shape[dim]
    return x if missing == 0 else torch.nn.functional.pad(x, (*[0, 0] * (x.dim() - 1 - dim), 0, missing))


def _refusal(where: Where, asked: str, found: str, cure: str) -> Exception:
    """Return the InputError to raise, after notifying the peers."""
    operator, place = where
    return refused(place.name, InputError(f"{operator.name}: {asked}", found, cure))
