"""Compiled kernels on GPUs: every annotated kernel of examples/kernels, every schedule, against torch.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_authored [--only TEXT] [--calls 20] [--trials 30]

Inputs are small whole numbers where a product is exact, and change at every call; outputs start as NaN. The ordinary
kernels are followed by the time of the compiled all-gather + matmul beside that of `ow.all_gather_matmul`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from triton.tools.tensor_descriptor import TensorDescriptor

import overweave as ow
from campaigns.authored_cases import (
    AT_PEERS,
    AUTHORS,
    BY_KERNEL,
    BY_TILES,
    CHUNKED_SUMS,
    GATHERS,
    KERNELS,
    PUSHED_BEHIND,
    SCATTERS,
)
from campaigns.gpu_ranks import integers, join, report, shard, spread_over
from overweave.ops.compile import Fused, compile
from overweave.schedules.transports import Asked

CHUNKED = (
    "all_gather.mesh pieces=1 col_pieces=2 lanes=2",
    "all_gather.ring",
    "all_gather.double_ring",
    "all_gather.islands",
)
REDUCED = ("all_reduce.two_shot pieces=2", "all_reduce.one_shot", "all_reduce.collective")
LAUNCH: dict[str, Any] = {"num_warps": 8, "num_stages": 3}
ROWS, DEPTH = 2048, 512
BLOCKS: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}


class Trial(NamedTuple):
    """One call: runs the fused kernel with fresh inputs and returns (found, exact, tolerance)."""

    name: str
    schedule: Mapping[str, Asked]
    run: Callable[[Fused, int], tuple[torch.Tensor, torch.Tensor, float]]


def empty(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)


def matmul(is_persistent: bool, side: str) -> Callable[[Fused, int], tuple[torch.Tensor, torch.Tensor, float]]:
    """side: `A`, gathered rows; `C`, summed rows; `AC`, both."""
    m, n, k = ROWS, 1024, DEPTH

    def run(fused: Fused, seed: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        a = integers(m, k, seed=seed if "A" in side else seed + 1000 * dist.get_rank())
        b = integers(k, n, seed=seed + 500 * (1 + dist.get_rank()))
        exact = a.float() @ b.float()
        if "C" in side:
            dist.all_reduce(exact)
            exact = shard(exact)
        out, sent = empty(*exact.shape), shard(a) if "A" in side else a
        if is_persistent:
            described = [TensorDescriptor.from_tensor(x, [128, 64]) for x in (sent, b.t().contiguous())]
            c = TensorDescriptor.from_tensor(out, [128, 128])
            fused(*described, c, m, n, k, **BLOCKS, GROUP_M=8, NUM_SMS=132, **LAUNCH)
        else:
            fused(sent, b, out, m, n, k, k, 1, n, 1, n, 1, **BLOCKS, GROUP_M=8, **LAUNCH)
        return out, exact, 4.0 if "C" in side else 0.5  # bf16 rounds sums of 512 and more

    return run


def reduced(fused: Fused, seed: int) -> tuple[torch.Tensor, torch.Tensor, float]:
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


def exchanged(fused: Fused, seed: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """all-to-all, matmul, all-to-all; `b` is the same everywhere, so the blocks come home."""
    m, n, k = 2048, 1024, 512
    a, b, out = integers(m, k, seed=seed + dist.get_rank()), integers(k, n, seed=seed + 90), empty(m, n)
    fused(a, b, out, m, n, k, k, 1, n, 1, n, 1, **BLOCKS, GROUP_M=8, **LAUNCH)
    return out, a.float() @ b.float(), 0.5


def sent(fused: Fused, seed: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """matmul, all-to-all of what each rank made: block p of rank s becomes block s of rank p."""
    m, n, k = 2048, 1024, 512
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sides = [integers(m, k, seed=seed + one) for one in range(ranks)]
    b, out, block = integers(k, n, seed=seed + 90), empty(m, n), m // ranks
    fused(sides[rank], b, out, m, n, k, k, 1, n, 1, n, 1, **BLOCKS, GROUP_M=8, **LAUNCH)
    mine = torch.cat([side[rank * block : (rank + 1) * block] for side in sides])
    return out, mine.float() @ b.float(), 0.5


def gate_up(fused: Fused, seed: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    m, n, k = 2048, 1024, 512
    x, gate, up = (integers(*shape, seed=seed + i) / 8 for i, shape in enumerate(((m, k), (k, n), (k, n))))
    out = empty(m, n)
    fused(shard(x), gate, up, out, m, n, k, **BLOCKS, **LAUNCH)
    return out, torch.nn.functional.silu(x.float() @ gate.float()) * (x.float() @ up.float()), 0.02


def batched(fused: Fused, seed: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    z, m, n, k = 8, 512, 512, 256
    a, b, c = integers(z, m, k, seed=seed), integers(z, k, n, seed=seed + 1), empty(z, m, n)
    fused(shard(a), b, c, z, m, n, k, **BLOCKS, **LAUNCH)
    return c, torch.bmm(a.float(), b.float()), 0.5


def norm(fused: Fused, seed: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    rows, cols, ranks = 512, 4096, dist.get_world_size()
    sides = [[integers(rows, cols, seed=seed + 10 * rank + i) for i in range(2)] for rank in range(ranks)]
    weight, out = integers(cols, seed=seed + 7), empty(ranks * rows, cols)
    fused(*sides[dist.get_rank()], weight, out, rows, cols, 1e-5, BLOCK=4096, num_warps=8)
    whole = torch.cat([x.float() + y.float() for x, y in sides])
    return out, whole * torch.rsqrt(whole.square().mean(1, keepdim=True) + 1e-5) * weight.float(), 0.05


def layer_norm(tensor: str) -> Callable[[Fused, int], tuple[torch.Tensor, torch.Tensor, float]]:
    """Of gathered rows X, or of own rows whose Y is pushed to all."""

    def run(fused: Fused, seed: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        cols, ranks = 4096, dist.get_world_size()
        x, weight, bias = integers(ROWS, cols, seed=seed), integers(cols, seed=seed + 1), integers(cols, seed=seed + 2)
        rows, y = ROWS if tensor == "X" else ROWS // ranks, empty(ROWS, cols)
        mean, rstd = (torch.empty(rows, device="cuda") for _ in range(2))
        fused(shard(x), y, weight, bias, mean, rstd, cols, rows, cols, 1e-5, BLOCK_SIZE=1024, num_warps=8)
        return y, torch.nn.functional.layer_norm(x.float(), (cols,), weight.float(), bias.float()), 0.05

    return run


def attention(is_causal: bool) -> Callable[[Fused, int], tuple[torch.Tensor, torch.Tensor, float]]:
    heads, dim = 8, 128

    def run(fused: Fused, seed: int) -> tuple[torch.Tensor, torch.Tensor, float]:
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


def by_hand() -> ow.Gather:
    """Every shard goes round in two chunks: pushed to the next rank in one lane, pulled by columns in another."""
    ranks, rows = dist.get_world_size(), ROWS // dist.get_world_size()
    moves: list[ow.Put | ow.Get] = []
    for owner in range(ranks):
        low, half = owner * rows, rows // 2
        for step in range(ranks - 1):
            rank, peer = (owner + step) % ranks, (owner + step + 1) % ranks
            moves.append(ow.Put(rank, peer, ow.Chunk((low, low + half))))
            for cols in ((0, DEPTH // 2), (DEPTH // 2, DEPTH)):
                moves.append(ow.Get(peer, rank, ow.Chunk((low + half, low + rows), cols), lane=1))
    return ow.Gather(ranks, tuple(moves))


def sums_by_hand() -> ow.Reduction:
    """Partials go down a chain in two lanes, pushed and pulled, and every rank on the way adds its own."""
    ranks, rows = dist.get_world_size(), ROWS // dist.get_world_size()
    moves: list[ow.Put | ow.Get | ow.Sum] = []
    for step in range(1, ranks):
        for rank in range(ranks):
            owner, peer = (rank - step) % ranks, (rank + 1) % ranks
            low, half = owner * rows, rows // 2
            for part in (ow.Chunk((low, low + half)), ow.Chunk((low + half, low + rows))):
                moves += [ow.Sum(rank, part)] if step > 1 else []
                is_first = part.rows[0] == low
                moves.append(ow.Put(rank, peer, part) if is_first else ow.Get(peer, rank, part, lane=1))
    return ow.Reduction(ranks, tuple(moves))


def blocks_by_hand(sends: bool) -> ow.AllToAll:
    """Every block in two chunks, one in each of two lanes."""
    ranks, block = dist.get_world_size(), ROWS // dist.get_world_size()
    moves = [
        ow.Put(rank, peer, ow.Chunk((peer * block + low, peer * block + low + block // 2)), lane=int(low > 0))
        for step in range(1, ranks)
        for rank in range(ranks)
        for peer in [(rank + step) % ranks]
        for low in (0, block // 2)
    ]
    return ow.AllToAll(ranks, tuple(moves), sends)


def halves() -> tuple[tuple[ow.Chunk, ...], tuple[ow.Chunk, ...]]:
    """The upper and the lower half of every rank's rows."""
    ranks, rows = dist.get_world_size(), ROWS // dist.get_world_size()
    cuts = [(rank * rows, rank * rows + rows // 2, (rank + 1) * rows) for rank in range(ranks)]
    return tuple(ow.Chunk((low, half)) for low, half, _ in cuts), tuple(ow.Chunk((half, end)) for _, half, end in cuts)


def pulled_and_carried() -> ow.Gather:
    """Peers come for one half of every shard, so that it is copied; tiles push the other from there."""
    upper, lower = halves()
    pairs = [(rank, peer) for rank in range(len(upper)) for peer in range(len(upper)) if peer != rank]
    pushes = (ow.Put(rank, peer, upper[rank], mover="tiles") for rank, peer in pairs)
    return ow.Gather(len(upper), (*pushes, *(ow.Get(peer, rank, lower[rank]) for rank, peer in pairs)))


def partly_the_librarys(sends: bool) -> ow.AllToAll:
    """One half of every block is the library's, the other is pushed."""
    upper, lower = halves()
    pairs = [(rank, peer) for rank in range(len(upper)) for peer in range(len(upper)) if peer != rank]
    return ow.AllToAll(
        len(upper), (ow.Collective(upper), *(ow.Put(rank, peer, lower[peer]) for rank, peer in pairs)), sends
    )


def partly_summed_by_the_library(everywhere: bool) -> ow.Reduction:
    """One half of every shard; partials of the other go to their owner, and its sum to all who want it."""
    upper, lower = halves()
    pairs = [(rank, owner) for owner in range(len(upper)) for rank in range(len(upper)) if owner != rank]
    moves: list[ow.Put | ow.Sum | ow.Collective] = [ow.Collective(upper)]
    moves += [ow.Put(rank, owner, lower[owner]) for rank, owner in pairs]
    if everywhere:
        moves += [ow.Sum(owner, part) for owner, part in enumerate(lower)]
        moves += [ow.Put(owner, rank, lower[owner], lane=1) for rank, owner in pairs]
    return ow.Reduction(len(upper), tuple(moves), everywhere)


def trials() -> Iterator[Trial]:
    """Every kernel with every schedule."""
    for how in (*CHUNKED_SUMS, *PUSHED_BEHIND):
        run = reduced if how.startswith("all_reduce") else matmul(False, "C")
        yield Trial("matmul", {"C": how}, run)
    yield Trial("matmul", {"C": sums_by_hand()}, matmul(False, "C"))
    yield Trial("matmul", {"A": "all_gather.collective", "C": "reduce_scatter.ring"}, matmul(False, "AC"))
    yield Trial("persistent", {"A": "all_gather.ring", "C": "reduce_scatter.mesh"}, matmul(True, "AC"))
    yield Trial("persistent", {"C": PUSHED_BEHIND[0]}, matmul(True, "C"))
    yield Trial("matmul", {"C": "all_to_all.send mover=bulk_kernel"}, sent)
    yield Trial("matmul", {"A": blocks_by_hand(False), "C": blocks_by_hand(True)}, exchanged)
    yield Trial("matmul", {"A": pulled_and_carried()}, matmul(False, "A"))
    yield Trial("persistent", {"A": pulled_and_carried()}, matmul(True, "A"))
    yield Trial("matmul", {"A": partly_the_librarys(False), "C": partly_the_librarys(True)}, exchanged)
    yield Trial("matmul", {"C": partly_summed_by_the_library(False)}, matmul(False, "C"))
    yield Trial("matmul", {"C": partly_summed_by_the_library(True)}, reduced)
    for name, is_persistent in (("matmul", False), ("persistent", True)):
        yield from (Trial(name, {"A": how}, matmul(is_persistent, "A")) for how in (*GATHERS, *CHUNKED, by_hand()))
        yield from (Trial(name, {"C": how}, matmul(is_persistent, "C")) for how in SCATTERS)
        yield Trial(name, {"A": GATHERS[0], "C": SCATTERS[0]}, matmul(is_persistent, "AC"))
        yield from (Trial(name, {"A": how}, matmul(is_persistent, "A")) for how in (*BY_KERNEL, *BY_TILES))
    yield from (Trial("matmul", {"C": how}, reduced) for how in REDUCED)
    yield Trial("matmul", {"A": "all_to_all.receive", "C": "all_to_all.send"}, exchanged)
    yield Trial("matmul", {"C": AT_PEERS[0]}, matmul(False, "C"))
    yield Trial("matmul", {"A": BY_TILES[0], "C": AT_PEERS[0]}, matmul(False, "AC"))
    yield Trial("matmul", {"C": "all_reduce.two_shot mover=tiles"}, reduced)
    one_shot = (f"all_reduce.one_shot mover={mover}" for mover in ("copy_kernel", "bulk_kernel", "tiles"))
    yield from (Trial("matmul", {"C": how}, reduced) for how in one_shot)
    library = {"A": "all_to_all.receive_collective", "C": "all_to_all.send_collective"}
    yield Trial("matmul", library, exchanged)
    yield Trial("matmul", {"A": "all_to_all.receive mover=bulk_tiles", "C": AT_PEERS[1]}, exchanged)
    yield from (Trial("gate_up", {"X": how}, gate_up) for how in (*GATHERS, *BY_KERNEL, *BY_TILES))
    yield from (Trial("batched", {"A": how}, batched) for how in (*GATHERS, *BY_KERNEL, *BY_TILES))
    yield from (Trial("norm", {"OUT": how}, norm) for how in ("spread.push", "spread.push pieces=4", AT_PEERS[2]))
    yield from (Trial("layer_norm", {"X": how}, layer_norm("X")) for how in (*GATHERS, *BY_KERNEL, *BY_TILES))
    yield from (Trial("layer_norm", {"Y": how}, layer_norm("Y")) for how in ("spread.push pieces=2", AT_PEERS[2]))
    for is_causal in (False, True):
        yield from (Trial("attention", {"K": how, "V": how}, attention(is_causal)) for how in (*GATHERS, *BY_TILES))


def check(trial: Trial, calls: int) -> None:
    started = time.monotonic()
    fused = compile(f"{KERNELS / trial.name}.py:{AUTHORS[trial.name].name}", trial.schedule)
    failures: list[str] = []
    for call in range(calls):
        found, exact, tolerance = trial.run(fused, 17 * call)
        error = (found.float() - exact).abs().max()
        if not error <= tolerance * max(1.0, float(exact.abs().max()) / 256):
            failures.append(f"call {call}: off by {float(error)}")
    words = " ".join(f"{tensor}={how}" for tensor, how in trial.schedule.items())
    report.line(f"{trial.name} {words}"[:60], calls, failures, started)


def compare(m: int, n: int, k: int) -> None:
    """The compiled all-gather + matmul beside our own operator, milliseconds, the slowest rank's median."""
    a, b, out = integers(m, k, seed=1), integers(k, n, seed=2), empty(m, n)
    mine, blocks = shard(a), {**BLOCKS, "BLOCK_N": 256, "GROUP_M": 8}
    plain = compile(f"{KERNELS / 'matmul'}.py:matmul_kernel", GATHERS[0])
    bulk = compile(f"{KERNELS / 'persistent'}.py:persistent_kernel", GATHERS[0])
    sides = [(mine, [128, 64]), (b.t().contiguous(), [256, 64]), (out, [128, 256])]
    described = [TensorDescriptor.from_tensor(tensor, block) for tensor, block in sides]
    methods: dict[str, Callable[[], object]] = {
        "compiled matmul": lambda: plain(mine, b, out, m, n, k, k, 1, n, 1, n, 1, **blocks, **LAUNCH),
        "compiled persistent": lambda: bulk(*described, m, n, k, **blocks, NUM_SMS=132, **LAUNCH),
        "push pieces=2 kernel=portable": lambda: ow.all_gather_matmul(mine, b, plan="push pieces=2 kernel=portable"),
        "push": lambda: ow.all_gather_matmul(mine, b, plan="push"),
    }
    for name, call in methods.items():
        milliseconds = median_ms(call)
        if dist.get_rank() == 0:
            print(f"{m}x{n}x{k} {name}: {milliseconds:.3f} ms", flush=True)


def median_ms(call: Callable[[], object], rounds: int = 15) -> float:
    samples = []
    for turn in range(rounds + 3):
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if turn >= 3:
            samples.append(begin.elapsed_time(end))
    median = torch.tensor([sorted(samples)[rounds // 2]], device="cuda")
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return float(median)


def main() -> None:
    parser = argparse.ArgumentParser(prog="campaigns.gpu_authored", description=__doc__)
    parser.add_argument("--only", default="", help="trials whose kernel and schedules contain this text")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--trials", type=int, default=0, help="how many, spread over all; then nothing is timed")
    arguments = parser.parse_args()
    join(timedelta(seconds=20))
    asked = [one for one in trials() if arguments.only in f"{one.name} {' '.join(map(str, one.schedule.values()))}"]
    for trial in spread_over(asked, arguments.trials or len(asked)):
        check(trial, arguments.calls)
    if not arguments.only and not arguments.trials:
        compare(8192, 14336 // dist.get_world_size(), 4096)
    ow.check()
    report.finish()


if __name__ == "__main__":
    main()
