"""The operators in plain torch.distributed: what they mean, and what the tests and the demo compare with."""

from __future__ import annotations

import torch
import torch.distributed as dist

from overweave.ir.shards import shard_rows


def all_gather_matmul(
    x_shard: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup | None = None, *, m: int | None = None
) -> torch.Tensor:
    """`cat(shards) @ w`: gather, then multiply. Shapes as in ops/all_gather_matmul.py."""
    world_size = dist.get_world_size(group)
    rows = x_shard.shape[0] * world_size if m is None else m
    size = -(-rows // world_size)
    padded = x_shard.new_zeros((size, x_shard.shape[1]))
    padded[: x_shard.shape[0]] = x_shard
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat(gathered)[:rows] @ w


def matmul_reduce_scatter(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """`sum over ranks of x @ w`, this rank's rows: multiply, then reduce. Shapes as in ops/matmul_reduce_scatter.py."""
    partial = x @ w
    dist.all_reduce(partial, group=group)
    lo, hi = shard_rows(x.shape[0], dist.get_world_size(group), dist.get_rank(group))
    return partial[lo:hi]
