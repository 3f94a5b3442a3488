"""Tensors of any rank as matrices of rows, and back; the gathered or scattered dimension comes first."""

from __future__ import annotations

from typing import NamedTuple

import torch

from overweave.compat.torch_names import c10d_functional
from overweave.ir.shards import shard_rows
from overweave.ops.call.groups import group_of
from overweave.ops.dispatch.route import group_rank_of

Results = list[torch.Tensor | None]


class RowGather(NamedTuple):
    """A tensor's dimension `dim`, of global length `size`, split over the ranks of a group as by `torch.chunk`."""

    dim: int
    group: str
    size: int

    @property
    def uneven_size(self) -> int | None:
        """The global length if ranks hold unequal numbers of rows, else None."""
        return self.size if self.size % group_rank_of(self.group).world_size else None

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the gathered tensor, a view."""
        place = group_rank_of(self.group)
        lo, hi = shard_rows(self.size, place.world_size, place.rank)
        return whole.narrow(self.dim, lo, hi - lo)


def as_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return `[.., S at dim, .., k]` as a contiguous matrix `[S * others, k]`; a copy unless `dim` is the first."""
    return x.movedim(dim, 0).flatten(0, -2).contiguous()


def as_before(rows: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    """Undo `as_rows`: view `[S' * others, n]` as `[.., S' at dim, .., n]`, the other dimensions those of `like`."""
    others = [extent for index, extent in enumerate(like.shape[:-1]) if index != dim]
    leading = rows.shape[0] // max(1, torch.Size(others).numel())
    return rows.view(leading, *others, rows.shape[-1]).movedim(0, dim)


def averaged(total: torch.Tensor, reduce_op: str, group: str) -> torch.Tensor:
    """Divide a sum over ranks by their number, in place, if reduce_op is "avg"."""
    return total.div_(group_of(group).world_size) if reduce_op == "avg" else total


def gathered_by_c10d(shard: torch.Tensor, gather: RowGather) -> torch.Tensor:
    """Return all_gather(shard, dim), contiguous, by torch's functional collective; unequal shards are padded."""
    ranks, collectives = group_of(gather.group).world_size, c10d_functional
    missing = -(-gather.size // ranks) - shard.shape[gather.dim]
    rows = shard.movedim(gather.dim, 0)
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    whole = collectives.wait_tensor(collectives.all_gather_into_tensor(rows.contiguous(), ranks, gather.group))
    every: torch.Tensor = whole[: gather.size].movedim(0, gather.dim).contiguous()
    return every


def scattered_by_c10d(whole: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """Return reduce_scatter(whole, dim), contiguous, by torch's functional collective; W must divide the dimension."""
    ranks, collectives = group_of(group).world_size, c10d_functional
    own = collectives.wait_tensor(collectives.reduce_scatter_tensor(as_rows(whole, dim), "sum", ranks, group))
    return as_before(own, whole, dim).contiguous()
