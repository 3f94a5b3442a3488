"""The first call: both operators beside what they mean in plain torch.

python examples/01_first_call.py                                  # four emulated ranks, no GPU needed
torchrun --nproc-per-node 4 examples/01_first_call.py --cuda      # one rank per GPU
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from driver import device, on_ranks

import overweave as ow

M, N, K = 256, 96, 64  # of one rank's matmul


def first_call() -> float:
    """One rank: the largest differences from plain torch. Every rank of the world runs it.

    The numbers are small integers, which bf16 adds exactly in any order: there must be no difference.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    here = device()
    torch.manual_seed(rank)

    x_shard = torch.randint(-1, 2, (M // world_size, K), device=here).bfloat16()
    w = torch.randint(-1, 2, (K, N), device=here).bfloat16()
    y = ow.all_gather_matmul(x_shard, w)  # [m/W, k], [k, n] -> [m, n]
    shards = [torch.empty_like(x_shard) for _ in range(world_size)]
    dist.all_gather(shards, x_shard)
    difference = (y - torch.cat(shards) @ w).abs().max()

    x = torch.randint(-1, 2, (M, K), device=here).bfloat16()
    z = ow.matmul_reduce_scatter(x, w)  # [m, k], [k, n] -> [m/W, n]
    partial = x @ w
    dist.all_reduce(partial)
    difference += (z - partial.chunk(world_size)[rank]).abs().max()

    ow.check()  # on a GPU calls return before they have ended: this waits, and raises what went wrong
    if rank == 0:
        print(f"rank 0 of {world_size}: y {list(y.shape)}, z {list(z.shape)}, off plain torch by {difference:.3g}")
        print(ow.explain("all_gather_matmul", m=M, n=N, k=K, world_size=world_size, device=here))
    return float(difference)


if __name__ == "__main__":
    on_ranks(first_call)
