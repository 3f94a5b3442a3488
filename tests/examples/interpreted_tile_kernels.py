"""The kernels of examples/tile_kernels between processes, against plain torch, bit for bit where sums are exact.

Run by test_tile_kernels.py in a process of its own: where triton has been imported for compiling it cannot interpret.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from examples.tile_kernels.all_gather_experts import AllGatherExperts  # noqa: E402
from examples.tile_kernels.gathered_attention import GatheredAttention  # noqa: E402
from examples.tile_kernels.matmul_ring_reduce_scatter import MatmulReduceScatter  # noqa: E402
from overweave.runtime.host.processes import RanksFailed  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

WORLDS = (2, 3, 4)
CALLS = 3  # later ones find the memory as the first one left it
Sizes = tuple[int, ...]


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Small whole numbers: every sum of products is exact, whatever its order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).bfloat16()


def shard(whole: torch.Tensor) -> torch.Tensor:
    parts = whole.chunk(dist.get_world_size())
    return parts[dist.get_rank()].contiguous()


def ring(m: int, n: int, k: int) -> bool:
    operator = MatmulReduceScatter(m, n, torch.bfloat16, block=(16, 16), moved=(8, 32), ring=2)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for call in range(CALLS):
        a = [integers(m, k, seed=10 * call + one) for one in range(ranks)]
        b = [integers(k, n, seed=500 + 10 * call + one) for one in range(ranks)]
        exact = torch.stack([left.float() @ right.float() for left, right in zip(a, b, strict=True)]).sum(0)
        assert exact.abs().max() <= 256  # so that bf16 holds every sum on the way
        assert torch.equal(operator(a[rank], b[rank], block_k=16).float(), shard(exact)), (rank, call)
    return True


def experts(m: int, topk: int, count: int, h: int, d: int) -> bool:
    operator = AllGatherExperts((m, topk, count, h, d), torch.bfloat16, block=16, moved=(4, 16))
    for call in range(CALLS):
        generator = torch.Generator().manual_seed(call)
        chosen = torch.rand(m, count, generator=generator).topk(topk).indices
        if call == 2:
            chosen[:] = torch.arange(topk)  # two experts have all tokens, the others none
        tokens, weights = integers(m, h, seed=call), integers(count, h, d, seed=70 + dist.get_rank())
        exact = torch.einsum("ph,phd->pd", tokens.float().repeat_interleave(topk, 0), weights.float()[chosen.flatten()])
        found = operator(shard(tokens), chosen, weights, block_k=16, pull=2)
        assert torch.equal(found, exact.bfloat16()), (dist.get_rank(), call)
    return True


def attention(length: int, heads: int, dim: int) -> bool:
    operator = GatheredAttention((length, heads, dim), torch.float32)
    for call in range(CALLS):
        q, k, v = (integers(length, heads, dim, seed=3 * call + one).float() / 2 for one in range(3))
        found = operator(shard(q), shard(k), shard(v), blocks=(16, 16))
        sides = (x.double().transpose(0, 1) for x in (q, k, v))
        exact = torch.nn.functional.scaled_dot_product_attention(*sides).transpose(0, 1)
        assert (found - shard(exact)).abs().max() < 1e-5, (dist.get_rank(), call)
    return True


EVEN = {ring: (48, 24, 16), experts: (24, 2, 4, 16, 24), attention: (48, 2, 16)}
RAGGED = {ring: (45, 24, 16), experts: (22, 2, 5, 24, 16), attention: (45, 2, 16)}


@pytest.mark.parametrize(("kernel", "sizes"), EVEN.items())
def test_kernel_on_two_ranks(kernel: object, sizes: Sizes):
    assert run_ranks(kernel, 2, *sizes) == [True] * 2


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize(("kernel", "sizes"), RAGGED.items())
def test_kernel_whose_shards_and_tiles_are_short(ranks: int, kernel: object, sizes: Sizes):
    assert run_ranks(kernel, ranks, *sizes) == [True] * ranks


def missing_peer(rank: int) -> bool:
    """The last rank makes the operator and then does nothing."""
    operator = GatheredAttention((32, 2, 16), torch.float32)
    q = torch.ones(16, 2, 16)
    if dist.get_rank() != rank:
        operator(q, q, q, blocks=(16, 16))
    else:
        time.sleep(8)
    return True


def test_a_peer_that_does_not_come_is_a_typed_error():
    with pytest.raises(RanksFailed) as raised:
        run_ranks(missing_peer, 2, 1, group_timeout_s=2)
    assert raised.value.outcomes[0].error == "PeerTimeout"
