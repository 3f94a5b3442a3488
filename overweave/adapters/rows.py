"""Tensors of any rank as matrices whose rows ranks share, and back: the gathered or scattered dimension leads."""

from __future__ import annotations

import torch

from overweave.ops.call.groups import group_of

Results = list[torch.Tensor | None]


def as_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """`[.., S at dim, .., k]` as a contiguous matrix `[S * others, k]`; a copy unless the dimension leads already."""
    return x.movedim(dim, 0).flatten(0, -2).contiguous()


def as_before(rows: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    """A matrix `[S' * others, n]` as `[.., S' at dim, .., n]`: the other dimensions are those of `like`. A view."""
    others = [extent for index, extent in enumerate(like.shape[:-1]) if index != dim]
    leading = rows.shape[0] // max(1, torch.Size(others).numel())
    return rows.view(leading, *others, rows.shape[-1]).movedim(0, dim)


def averaged(total: torch.Tensor, reduce_op: str, group: str) -> torch.Tensor:
    """A sum over ranks, or their mean in its place."""
    return total.div_(group_of(group).world_size) if reduce_op == "avg" else total


def gathered_by_library(shard: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """all_gather(shard, dim), contiguous."""
    ranks, collectives = group_of(group).world_size, torch.ops._c10d_functional
    whole = collectives.wait_tensor(collectives.all_gather_into_tensor(as_rows(shard, dim), ranks, group))
    return as_before(whole, shard, dim).contiguous()


def scattered_by_library(whole: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """This rank's part of the sum over ranks, contiguous."""
    ranks, collectives = group_of(group).world_size, torch.ops._c10d_functional
    own = collectives.wait_tensor(collectives.reduce_scatter_tensor(as_rows(whole, dim), "sum", ranks, group))
    return as_before(own, whole, dim).contiguous()
