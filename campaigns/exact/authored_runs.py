"""What is asked of compiled kernels: each annotated kernel on data whose exact result is known.

A run takes the fused kernel and a seed, and returns what it wrote, what it should have written, and how much bf16 may
be off. Collective; outputs start as NaN. On GPUs sizes are those of a layer, on CPU ranks of a few small tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from triton.tools.tensor_descriptor import TensorDescriptor

import overweave as ow
from campaigns.gpu_ranks import integers, shard
from overweave.ops.author.compile import FusedKernel
from overweave.schedules.communication import Mover

# Lists of moves by hand for the campaign of compiled kernels: what each exercises that no schedule of a name does.
# All are of a tensor `[rows, cols]` whose shards, one for each of `ranks`, have whole tiles in either half.

Chunks = tuple[ow.Chunk, ...]


def halves(ranks: int, rows: int) -> tuple[Chunks, Chunks]:
    """The upper and the lower half of every rank's rows."""
    size = rows // ranks
    starts = range(0, ranks * size, size)
    upper = tuple(ow.Chunk((low, low + size // 2)) for low in starts)
    return upper, tuple(ow.Chunk((low + size // 2, low + size)) for low in starts)


def pairs(ranks: int) -> Iterator[tuple[int, int]]:
    """Every rank with every other, the nearest first."""
    return ((rank, (rank + step) % ranks) for step in range(1, ranks) for rank in range(ranks))


def round_trip(ranks: int, rows: int, cols: int) -> ow.Gather:
    """Every shard goes round in two chunks: pushed to the next rank in one lane, pulled by columns in another."""
    upper, lower = halves(ranks, rows)
    moves: list[ow.Put | ow.Get] = []
    for owner in range(ranks):
        for step in range(ranks - 1):
            rank, peer = (owner + step) % ranks, (owner + step + 1) % ranks
            moves.append(ow.Put(rank, peer, upper[owner]))
            for part in ((0, cols // 2), (cols // 2, cols)):
                moves.append(ow.Get(peer, rank, ow.Chunk(lower[owner].rows, part), lane=1))
    return ow.Gather(ranks, tuple(moves))


def chain_of_sums(ranks: int, rows: int) -> ow.Reduction:
    """Partials go down a chain in two lanes, pushed and pulled, and every rank on the way adds its own."""
    upper, lower = halves(ranks, rows)
    moves: list[ow.Put | ow.Get | ow.Sum] = []
    for step in range(1, ranks):
        for rank in range(ranks):
            owner, peer = (rank - step) % ranks, (rank + 1) % ranks
            for part in (upper[owner], lower[owner]):
                moves += [ow.Sum(rank, part)] if step > 1 else []
                is_pushed = part == upper[owner]
                moves.append(ow.Put(rank, peer, part) if is_pushed else ow.Get(peer, rank, part, lane=1))
    return ow.Reduction(ranks, tuple(moves))


def blocks(ranks: int, rows: int, sends: bool) -> ow.AllToAll:
    """Every block in two chunks, one in each of two lanes."""
    upper, lower = halves(ranks, rows)
    moves = [
        ow.Put(rank, peer, half[peer], lane=lane)
        for rank, peer in pairs(ranks)
        for lane, half in enumerate((upper, lower))
    ]
    return ow.AllToAll(ranks, tuple(moves), sends)


def carried_and_pulled(ranks: int, rows: int) -> ow.Gather:
    """Peers come for one half of every shard, so that it is copied; tiles push the other from there."""
    upper, lower = halves(ranks, rows)
    pushes = (ow.Put(rank, peer, upper[rank], mover="tiles") for rank, peer in pairs(ranks))
    return ow.Gather(ranks, (*pushes, *(ow.Get(peer, rank, lower[rank]) for rank, peer in pairs(ranks))))


def carried_and_collected(ranks: int, rows: int) -> ow.Gather:
    """The library gathers one half of every shard, tiles push the other, in bulk."""
    upper, lower = halves(ranks, rows)
    pushes = (ow.Put(rank, peer, lower[rank], mover="bulk_tiles") for rank, peer in pairs(ranks))
    return ow.Gather(ranks, (ow.Collective(upper), *pushes))


def each_its_own(ranks: int, rows: int) -> ow.Gather:
    """No two ranks do the same: one pushes by copy engine, one by a kernel, from one everybody pulls, in two lanes."""
    ways: tuple[Mover, ...] = ("bulk_kernel", "copy_engine", "copy_engine")
    moves: list[ow.Put | ow.Get] = []
    for part in halves(ranks, rows):
        for rank, peer in pairs(ranks):
            is_pulled = rank % len(ways) == 1
            put = ow.Put(rank, peer, part[rank], mover=ways[rank % len(ways)])
            moves.append(ow.Get(peer, rank, part[rank], lane=1) if is_pulled else put)
    return ow.Gather(ranks, tuple(moves))


def each_its_own_sums(ranks: int, rows: int) -> ow.Reduction:
    """One rank's partials go by a kernel, tiles store one's at their owners, the others' are the copy engine's."""
    ways: tuple[Mover, ...] = ("copy_kernel", "tiles", "copy_engine")
    size = rows // ranks
    moves = [
        ow.Put(rank, owner, ow.Chunk((owner * size, (owner + 1) * size)), mover=ways[rank % len(ways)])
        for rank, owner in pairs(ranks)
    ]
    return ow.Reduction(ranks, tuple(moves))


def partly_the_librarys(ranks: int, rows: int, sends: bool) -> ow.AllToAll:
    """One half of every block is the library's, the other is pushed."""
    upper, lower = halves(ranks, rows)
    pushes = (ow.Put(rank, peer, lower[peer]) for rank, peer in pairs(ranks))
    return ow.AllToAll(ranks, (ow.Collective(upper), *pushes), sends)


def partly_summed_by_the_library(ranks: int, rows: int, everywhere: bool) -> ow.Reduction:
    """One half of every shard; partials of the other go to their owner, and its sum to all who want it."""
    upper, lower = halves(ranks, rows)
    moves: list[ow.Put | ow.Sum | ow.Collective] = [ow.Collective(upper)]
    moves += [ow.Put(rank, owner, lower[owner]) for rank, owner in pairs(ranks)]
    if everywhere:
        moves += [ow.Sum(owner, part) for owner, part in enumerate(lower)]
        moves += [ow.Put(owner, rank, lower[owner], lane=1) for owner, rank in pairs(ranks)]
    return ow.Reduction(ranks, tuple(moves), everywhere)


Found = tuple[torch.Tensor, torch.Tensor, float]
Run = Callable[[FusedKernel, int], Found]


class Scale(NamedTuple):
    """Sizes of runs. tile: rows and columns of a tile. rows: of the shard of a rank. launch: what a GPU is told."""

    tile: int
    depth: int
    rows: int
    columns: int
    k: int
    batches: int
    cols: int
    heads: int
    dim: int
    launch: dict[str, Any]

    @property
    def blocks(self) -> dict[str, Any]:
        return {"BLOCK_M": self.tile, "BLOCK_N": self.tile, "BLOCK_K": self.depth}

    @property
    def every_row(self) -> int:
        """Of all ranks."""
        return self.rows * dist.get_world_size()


LARGE = Scale(128, 64, 512, 1024, 512, 8, 4096, 8, 128, {"num_warps": 8, "num_stages": 3})
SMALL = Scale(16, 16, 32, 32, 32, 6, 40, 2, 16, {})


def scale() -> Scale:
    return LARGE if torch.cuda.is_available() else SMALL


def empty(*shape: int) -> torch.Tensor:
    where = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.full(shape, torch.nan, device=where, dtype=torch.bfloat16)


def rounding(exact: torch.Tensor, most: float) -> float:
    """By how much whole numbers may be off: bf16 holds all up to 256."""
    return 0.0 if not exact.numel() or float(exact.abs().max()) <= 256 else most


def matmul(is_persistent: bool, side: str, rows: int = 0) -> Run:
    """side: rows gathered of `A`, or of `B`, the weight of a plain matmul, which tiles read whole; `C`, summed.

    rows: of all ranks, if not the usual ones.
    """

    def run(fused: FusedKernel, seed: int) -> Found:
        size = scale()
        m, n, k, tile = rows or size.every_row, size.columns, size.k, size.tile
        a = integers(m, k, seed=seed if "A" in side else seed + 1000 * dist.get_rank())
        b = integers(k, n, seed=seed + 500 * (1 if "B" in side else 1 + dist.get_rank()))
        exact = a.float() @ b.float()
        if "C" in side:
            dist.all_reduce(exact)
            exact = shard(exact)
        out, sent = empty(*exact.shape), shard(a) if "A" in side else a
        b = shard(b) if "B" in side else b
        if is_persistent:
            described = [TensorDescriptor.from_tensor(x, [tile, size.depth]) for x in (sent, b.t().contiguous())]
            c, sms = TensorDescriptor.from_tensor(out, [tile, tile]), 132 if size is LARGE else 3
            fused(*described, c, m, n, k, **size.blocks, GROUP_M=8, NUM_SMS=sms, **size.launch)
        else:
            fused(sent, b, out, m, n, k, k, 1, n, 1, n, 1, **size.blocks, GROUP_M=8, **size.launch)
        return out, exact, rounding(exact, 4.0 if "C" in side else 0.5)

    return run


def reduced(fused: FusedKernel, seed: int) -> Found:
    size = scale()
    m, n, k = size.every_row, size.columns, size.k
    a, b, out = (
        integers(m, k, seed=seed + dist.get_rank()),
        integers(k, n, seed=seed + 90 + dist.get_rank()),
        empty(m, n),
    )
    exact = a.float() @ b.float()
    dist.all_reduce(exact)
    fused(a, b, out, m, n, k, k, 1, n, 1, n, 1, **size.blocks, GROUP_M=8, **size.launch)
    return out, exact, rounding(exact, 4.0)


def exchanged(fused: FusedKernel, seed: int) -> Found:
    """all-to-all, matmul, all-to-all; `b` is the same everywhere, so the blocks come home."""
    size = scale()
    m, n, k = size.every_row, size.columns, size.k
    a, b, out = integers(m, k, seed=seed + dist.get_rank()), integers(k, n, seed=seed + 90), empty(m, n)
    fused(a, b, out, m, n, k, k, 1, n, 1, n, 1, **size.blocks, GROUP_M=8, **size.launch)
    exact = a.float() @ b.float()
    return out, exact, rounding(exact, 0.5)


def sent(block: int) -> Run:
    """matmul, all-to-all of what each rank made: `block` rows, the p-th of rank s becomes the s-th of rank p."""

    def run(fused: FusedKernel, seed: int) -> Found:
        size, ranks, rank = scale(), dist.get_world_size(), dist.get_rank()
        n, k = size.columns, size.k
        sides = [integers(ranks * block, k, seed=seed + one) for one in range(ranks)]
        b, out = integers(k, n, seed=seed + 90), empty(ranks * block, n)
        fused(sides[rank], b, out, len(out), n, k, k, 1, n, 1, n, 1, **size.blocks, GROUP_M=8, **size.launch)
        exact = torch.cat([side[rank * block : (rank + 1) * block] for side in sides]).float() @ b.float()
        return out, exact, rounding(exact, 0.5)

    return run


def gate_up(fused: FusedKernel, seed: int) -> Found:
    size = scale()
    m, n, k = size.every_row, size.columns, size.k
    x, gate, up = (integers(*shape, seed=seed + i) / 8 for i, shape in enumerate(((m, k), (k, n), (k, n))))
    out = empty(m, n)
    fused(shard(x), gate, up, out, m, n, k, **size.blocks, **size.launch)
    return out, torch.nn.functional.silu(x.float() @ gate.float()) * (x.float() @ up.float()), 0.02


def batched(fused: FusedKernel, seed: int) -> Found:
    size = scale()
    z, m, n, k = size.batches, size.rows, size.columns, size.k // 2
    a, b, c = integers(z, m, k, seed=seed), integers(z, k, n, seed=seed + 1), empty(z, m, n)
    fused(shard(a), b, c, z, m, n, k, **size.blocks, **size.launch)
    exact = torch.bmm(a.float(), b.float())
    return c, exact, rounding(exact, 0.5)


def norm(fused: FusedKernel, seed: int) -> Found:
    rows, cols, ranks = scale().rows, scale().cols, dist.get_world_size()
    sides = [[integers(rows, cols, seed=seed + 10 * rank + i) for i in range(2)] for rank in range(ranks)]
    weight, out = integers(cols, seed=seed + 7), empty(ranks * rows, cols)
    fused(*sides[dist.get_rank()], weight, out, rows, cols, 1e-5, BLOCK=max(64, cols), num_warps=8)
    whole = torch.cat([x.float() + y.float() for x, y in sides])
    return out, whole * torch.rsqrt(whole.square().mean(1, keepdim=True) + 1e-5) * weight.float(), 0.05


def layer_norm(tensor: str) -> Run:
    """Of gathered rows X, or of own rows whose Y is pushed to all."""

    def run(fused: FusedKernel, seed: int) -> Found:
        every, cols = scale().every_row, scale().cols
        x, weight, bias = integers(every, cols, seed=seed), integers(cols, seed=seed + 1), integers(cols, seed=seed + 2)
        rows, y = every if tensor == "X" else scale().rows, empty(every, cols)
        mean, rstd = (torch.empty(rows, device=x.device) for _ in range(2))
        fused(shard(x), y, weight, bias, mean, rstd, cols, rows, cols, 1e-5, BLOCK_SIZE=max(16, cols // 4), num_warps=8)
        return y, torch.nn.functional.layer_norm(x.float(), (cols,), weight.float(), bias.float()), 0.05

    return run


def attention(is_causal: bool) -> Run:

    def run(fused: FusedKernel, seed: int) -> Found:
        size = scale()
        length, own, heads, dim = size.every_row, size.rows, size.heads, size.dim
        q, k, v = (integers(length, heads, dim, seed=seed + i) / 2 for i in range(3))
        mine, start = shard(q), own * dist.get_rank()
        out = empty(*mine.shape)
        constants: dict[str, Any] = {"BLOCK_Q": size.tile, "BLOCK_S": size.depth, "CAUSAL": is_causal}
        fused(mine, shard(k), shard(v), out, own, length, heads, dim, start, dim**-0.5, **constants, **size.launch)
        queries, keys, values = (x.float().transpose(0, 1) for x in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=is_causal)
        exact = mixed.transpose(0, 1)
        return out, exact[start : start + own], 0.05

    return run
