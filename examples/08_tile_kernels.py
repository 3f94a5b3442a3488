"""Three kernels fused by hand with the tile primitives, against plain torch: four emulated ranks, real signals, no GPU.

python examples/08_tile_kernels.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from overweave.runtime.interpreted import interpreter

interpreter.repair()  # in this process Triton interprets

sys.path.insert(0, str(Path(__file__).parent))

from tile_kernels.all_gather_experts import AllGatherExperts  # noqa: E402
from tile_kernels.gathered_attention import GatheredAttention  # noqa: E402
from tile_kernels.matmul_ring_reduce_scatter import MatmulReduceScatter  # noqa: E402

from overweave.runtime.host.processes import run_ranks  # noqa: E402

RANKS = 4


def data(*shape: int, seed: int) -> torch.Tensor:
    """The same numbers on every rank that asks with the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shard(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(RANKS)[dist.get_rank()].contiguous()


def matmul_reduce_scatter() -> float:
    """How far this rank's rows of the sum of all products are off plain torch."""
    m, n, k, rank = 48, 24, 32, dist.get_rank()
    operator = MatmulReduceScatter(m, n, torch.float32, block=(16, 16), moved=(4, 32), ring=2)
    sides = [(data(m, k, seed=one), data(k, n, seed=10 + one)) for one in range(RANKS)]
    z = operator(*sides[rank], block_k=16)
    return float((z - shard(sum(a @ b for a, b in sides))).abs().max())


def all_gather_experts() -> float:
    """How far all tokens times the weights of their experts are off plain torch."""
    m, topk, experts, h, d = 24, 2, 4, 16, 24
    operator = AllGatherExperts((m, topk, experts, h, d), torch.float32, block=16, moved=(4, 16))
    tokens, weights = data(m, h, seed=1), data(experts, h, d, seed=2)
    chosen = data(m, experts, seed=3).topk(topk).indices
    y = operator(shard(tokens), chosen, weights, block_k=16, pull=2)
    exact = torch.einsum("ph,phd->pd", tokens.repeat_interleave(topk, 0), weights[chosen.flatten()])
    return float((y - exact).abs().max())


def gathered_attention() -> float:
    """How far this rank's queries over the keys and values of all ranks are off plain torch."""
    operator = GatheredAttention((48, 2, 16), torch.float32)
    q, k, v = (data(48, 2, 16, seed=one) for one in range(3))
    o = operator(shard(q), shard(k), shard(v), blocks=(16, 16))
    mixed = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)))
    return float((o - shard(mixed.transpose(0, 1))).abs().max())


def main() -> None:
    for kernel in (matmul_reduce_scatter, all_gather_experts, gathered_attention):
        print(f"{kernel.__name__}: off plain torch by {max(run_ranks(kernel, RANKS)):.1e} on {RANKS} ranks")


if __name__ == "__main__":
    main()
