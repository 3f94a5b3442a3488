"""What the campaign of compiled kernels calls: each annotated kernel on data whose exact result is known.

A run takes the fused kernel and a seed, and returns what it wrote, what it should have written, and how much bf16 may
be off. Collective; outputs start as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from triton.tools.tensor_descriptor import TensorDescriptor

from campaigns.gpu_ranks import integers, shard
from overweave.ops.author.compile import FusedKernel

Found = tuple[torch.Tensor, torch.Tensor, float]
Run = Callable[[FusedKernel, int], Found]
LAUNCH: dict[str, Any] = {"num_warps": 8, "num_stages": 3}
ROWS, DEPTH = 2048, 512
BLOCKS: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}


def empty(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)


def matmul(is_persistent: bool, side: str, m: int = ROWS) -> Run:
    """side: rows gathered of `A`, or of `B`, the weight of a plain matmul, which tiles read whole; `C`, summed."""
    n, k = 1024, DEPTH

    def run(fused: FusedKernel, seed: int) -> Found:
        a = integers(m, k, seed=seed if "A" in side else seed + 1000 * dist.get_rank())
        b = integers(k, n, seed=seed + 500 * (1 if "B" in side else 1 + dist.get_rank()))
        exact = a.float() @ b.float()
        if "C" in side:
            dist.all_reduce(exact)
            exact = shard(exact)
        out, sent = empty(*exact.shape), shard(a) if "A" in side else a
        b = shard(b) if "B" in side else b
        if is_persistent:
            described = [TensorDescriptor.from_tensor(x, [128, 64]) for x in (sent, b.t().contiguous())]
            c = TensorDescriptor.from_tensor(out, [128, 128])
            fused(*described, c, m, n, k, **BLOCKS, GROUP_M=8, NUM_SMS=132, **LAUNCH)
        else:
            fused(sent, b, out, m, n, k, k, 1, n, 1, n, 1, **BLOCKS, GROUP_M=8, **LAUNCH)
        return out, exact, 4.0 if "C" in side else 0.5  # bf16 rounds sums of 512 and more

    return run


def reduced(fused: FusedKernel, seed: int) -> Found:
    m, n, k = 2048, 1024, 512
    a, b, out = (
        integers(m, k, seed=seed + dist.get_rank()),
        integers(k, n, seed=seed + 90 + dist.get_rank()),
        empty(m, n),
    )
    exact = a.float() @ b.float()
    dist.all_reduce(exact)
    fused(a, b, out, m, n, k, k, 1, n, 1, n, 1, **BLOCKS, GROUP_M=8, **LAUNCH)
    return out, exact, 4.0


def exchanged(fused: FusedKernel, seed: int) -> Found:
    """all-to-all, matmul, all-to-all; `b` is the same everywhere, so the blocks come home."""
    m, n, k = 2048, 1024, 512
    a, b, out = integers(m, k, seed=seed + dist.get_rank()), integers(k, n, seed=seed + 90), empty(m, n)
    fused(a, b, out, m, n, k, k, 1, n, 1, n, 1, **BLOCKS, GROUP_M=8, **LAUNCH)
    return out, a.float() @ b.float(), 0.5


def sent(block: int) -> Run:
    """matmul, all-to-all of what each rank made: `block` rows, the p-th of rank s becomes the s-th of rank p."""

    def run(fused: FusedKernel, seed: int) -> Found:
        ranks, rank, n, k = dist.get_world_size(), dist.get_rank(), 1024, 512
        sides = [integers(ranks * block, k, seed=seed + one) for one in range(ranks)]
        b, out = integers(k, n, seed=seed + 90), empty(ranks * block, n)
        fused(sides[rank], b, out, len(out), n, k, k, 1, n, 1, n, 1, **BLOCKS, GROUP_M=8, **LAUNCH)
        mine = torch.cat([side[rank * block : (rank + 1) * block] for side in sides])
        return out, mine.float() @ b.float(), 0.5

    return run


def gate_up(fused: FusedKernel, seed: int) -> Found:
    m, n, k = 2048, 1024, 512
    x, gate, up = (integers(*shape, seed=seed + i) / 8 for i, shape in enumerate(((m, k), (k, n), (k, n))))
    out = empty(m, n)
    fused(shard(x), gate, up, out, m, n, k, **BLOCKS, **LAUNCH)
    return out, torch.nn.functional.silu(x.float() @ gate.float()) * (x.float() @ up.float()), 0.02


def batched(fused: FusedKernel, seed: int) -> Found:
    z, m, n, k = 8, 512, 512, 256
    a, b, c = integers(z, m, k, seed=seed), integers(z, k, n, seed=seed + 1), empty(z, m, n)
    fused(shard(a), b, c, z, m, n, k, **BLOCKS, **LAUNCH)
    return c, torch.bmm(a.float(), b.float()), 0.5


def norm(fused: FusedKernel, seed: int) -> Found:
    rows, cols, ranks = 512, 4096, dist.get_world_size()
    sides = [[integers(rows, cols, seed=seed + 10 * rank + i) for i in range(2)] for rank in range(ranks)]
    weight, out = integers(cols, seed=seed + 7), empty(ranks * rows, cols)
    fused(*sides[dist.get_rank()], weight, out, rows, cols, 1e-5, BLOCK=4096, num_warps=8)
    whole = torch.cat([x.float() + y.float() for x, y in sides])
    return out, whole * torch.rsqrt(whole.square().mean(1, keepdim=True) + 1e-5) * weight.float(), 0.05


def layer_norm(tensor: str) -> Run:
    """Of gathered rows X, or of own rows whose Y is pushed to all."""

    def run(fused: FusedKernel, seed: int) -> Found:
        cols, ranks = 4096, dist.get_world_size()
        x, weight, bias = integers(ROWS, cols, seed=seed), integers(cols, seed=seed + 1), integers(cols, seed=seed + 2)
        rows, y = ROWS if tensor == "X" else ROWS // ranks, empty(ROWS, cols)
        mean, rstd = (torch.empty(rows, device=x.device) for _ in range(2))
        fused(shard(x), y, weight, bias, mean, rstd, cols, rows, cols, 1e-5, BLOCK_SIZE=1024, num_warps=8)
        return y, torch.nn.functional.layer_norm(x.float(), (cols,), weight.float(), bias.float()), 0.05

    return run


def attention(is_causal: bool) -> Run:
    heads, dim = 8, 128

    def run(fused: FusedKernel, seed: int) -> Found:
        length = 1024 * dist.get_world_size()
        q, k, v = (integers(length, heads, dim, seed=seed + i) / 2 for i in range(3))
        mine, start = shard(q), 1024 * dist.get_rank()
        out = empty(*mine.shape)
        constants: dict[str, Any] = {"BLOCK_Q": 128, "BLOCK_S": 64, "CAUSAL": is_causal}
        fused(mine, shard(k), shard(v), out, 1024, length, heads, dim, start, dim**-0.5, **constants, **LAUNCH)
        queries, keys, values = (x.float().transpose(0, 1) for x in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=is_causal)
        exact = mixed.transpose(0, 1)
        return out, exact[start : start + 1024], 0.05

    return run
