"""What an operator's record means in plain torch.distributed: what trials compare with."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from overweave.ir.shards import shard_rows, strip_rows


class PlainCollectives(NamedTuple):
    """What the reference of an operator's record asks of a group, over matrices of `m` rows in all. strip: as of a
    Problem, whose rows a scatter deals to ranks.
    """

    group: dist.ProcessGroup | None
    m: int
    strip: int = 0

    def matmul(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    def all_gather(self, shard: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        return gathered_rows(shard, self.group, self.m if rows is None else rows)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(part, group=self.group)
        return part

    def reduce_scatter(self, part: torch.Tensor) -> torch.Tensor:
        ranks, rank, whole = dist.get_world_size(self.group), dist.get_rank(self.group), self.all_reduce(part)
        if self.strip and self.m:
            return torch.cat([whole[lo:hi] for lo, hi in strip_rows(self.m, ranks, rank, self.strip)])
        return whole[slice(*shard_rows(self.m, ranks, rank))]

    def all_to_all(self, blocks: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=self.group)
        return received


def gathered_rows(shard: torch.Tensor, group: dist.ProcessGroup | None, m: int | None) -> torch.Tensor:
    """All rows, in rank order; ranks hold them as torch.chunk deals them."""
    world_size = dist.get_world_size(group)
    rows = shard.shape[0] * world_size if m is None else m
    padded = shard.new_zeros((-(-rows // world_size), shard.shape[1]))
    padded[: shard.shape[0]] = shard
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat(gathered)[:rows]
