"""The matmul of few rows beside cuBLAS, over the local shapes of decoding: which configuration is quickest? One GPU.

    python -m campaigns.gpu_skinny [--rows 1 16 32 64] [--seconds 48]

First every configuration runs on integers, whose result is compared bit for bit, over ragged shapes too, and again,
because counters of shares must be back at zero. Then each is timed beside cuBLAS on normal numbers: one captured graph
calls it over sets of weights that fill the L2 cache more than twice, so that all come from memory. Times are of the
fastest of the replays, by turns, and of one call, with the gap before the next one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import product as product_of
from typing import TypeVar

import torch
from msgspec.structs import replace

from campaigns.gpu_ranks import need_gpus
from campaigns.rates.operands import operands, product
from overweave.ir.plan import MOST_SPLITS, SkinnyConfig
from overweave.memory.split_k import SharedShares
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.kernel_calls.call import Moving, stand_in_for
from overweave.runtime.kernel_calls.packed import SkinnyOperands, skinny_call, skinny_tiles
from overweave.schedules.tiles.shape import SHAPES, skinny_shape
from overweave.tuner.measure.timer import geometric_mean

# n and k: of `o` and `down` of Llama-3-8B and 70B at tensor parallel 4, then of query, key and value, and gate and up.
LAYERS = (
    (4096, 1024), (4096, 3584), (8192, 2048), (8192, 7168),
    (1536, 4096), (7168, 4096), (2560, 8192), (14336, 8192),
)  # fmt: skip
ROWS = (1, 16, 32, 64)
RAGGED = ((5, 264, 1000), (1, 40, 4104), (16, 72, 136), (33, 520, 264), (100, 1032, 520), (3, 77, 85))
COLD_BYTES = 160 << 20
LEAST_CALLS, REPLAYS = 12, 5
SMS = 132


def _swapped(block_m: int, *shapes: tuple[int, int, int]) -> tuple[SkinnyConfig, ...]:
    return tuple(replace(one, swapped=True) for one in _flat(block_m, *shapes))


def _flat(block_m: int, *shapes: tuple[int, int, int]) -> tuple[SkinnyConfig, ...]:
    return tuple(
        SkinnyConfig(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages)
        for block_n, block_k, stages in shapes
    )


# Tiles (columns, step of k) and stages, beside those that are chosen: from 60 to 160 KiB of a weight under way.
TALL = ((64, 128, 4), (64, 128, 6), (64, 256, 3), (64, 256, 4), (64, 64, 8), (128, 64, 6))
CONFIGS: dict[int, tuple[SkinnyConfig, ...]] = {
    16: (SHAPES[0], *_swapped(16, *TALL), replace(SHAPES[0], warps=8), replace(SHAPES[0], block_n=128, warps=8)),
    32: (SHAPES[1], *_swapped(32, (64, 128, 4), (64, 64, 8), (128, 64, 6)), *_flat(32, (64, 128, 5), (32, 128, 6))),
    64: (
        *(SHAPES[2], *_flat(64, (64, 128, 4), (32, 128, 5), (32, 128, 7), (128, 64, 6))),
        *_swapped(64, (64, 64, 8), (64, 128, 4), (128, 64, 6)),
    ),
}


def height(m: int) -> int:
    return next((rows for rows in CONFIGS if m <= rows), 64)


def candidates(m: int, n: int, k: int) -> tuple[SkinnyConfig, ...]:
    """The chosen one, and every configuration in about as many shares, in one more, and in twice as many."""
    chosen, found = skinny_shape((m, n, k), SMS), dict[SkinnyConfig, None]()
    for config in CONFIGS[height(m)]:
        least = max(1, SMS // skinny_tiles(config, m, n))
        sizes = (splits for splits in (least, least + 1, 2 * least) if splits <= min(MOST_SPLITS, k // config.block_k))
        found |= {replace(config, splits=splits): None for splits in sizes}
    return tuple({chosen: None} | found)


def name_of(config: SkinnyConfig) -> str:
    kind = ("swap" if config.swapped else "") + ("" if config.warps == 4 else str(config.warps))
    return f"{config.block_n}x{config.block_k}*{config.stages}/{config.splits}{kind}"


def wrong(config: SkinnyConfig, a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether two runs of it are not bit-equal to what is exact, or leave counters."""
    out, memory = torch.empty_like(exact), SharedShares(a.device)
    launch = Launch(skinny_call(config, SkinnyOperands(a, b, out), memory))
    is_right = True
    for _ in range(2):
        out.fill_(float("nan"))
        launch.start(torch.cuda.current_stream().cuda_stream)
        is_right &= torch.equal(out, exact)
    return not is_right or bool(memory.get(1, 1).arrivals.any())


def check_one(index: int, config: SkinnyConfig) -> list[str]:
    """What of a configuration is wrong: of an even shape and two ragged ones, in both layouts. Fills Triton's cache."""
    odd = [shape for shape in RAGGED if shape[0] > config.block_m // 2 or config.block_m == 16]
    tried = [(config.block_m, 1024, 4096), *(odd[(index + turn) % len(odd)] for turn in range(2))]
    found = []
    for (m, n, k), is_transposed in product_of(tried, (True, False)):
        a, b = operands(m, n, k, is_transposed)
        exact = product(a, b)
        for splits in (1, 3):
            one = replace(config, splits=splits)
            if wrong(one, a, b, exact):
                found.append(f"{m}x{n}x{k} {is_transposed} {name_of(one)}")
    return found


def check_all() -> list[str]:
    """Every configuration, in processes beside each other."""
    every = [config for group in CONFIGS.values() for config in group]
    with ProcessPoolExecutor(min(24, multiprocessing.cpu_count()), multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(check_one, index, config) for index, config in enumerate(every)]
        return [one for job in jobs for one in job.result()]


def graph_of(call: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(calls):
            call(turn)
    return graph


Method = TypeVar("Method")


def times_us(calls: dict[Method, Callable[[int], object]], count: int) -> dict[Method, float]:
    """Of one call each, of the fastest replay of a graph of `count`; replays of all by turns."""
    graphs = {name: graph_of(call, count) for name, call in calls.items()}
    took = dict.fromkeys(calls, float("inf"))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            took[name] = min(took[name], begin.elapsed_time(end) * 1e3 / count)
    return took


def time_shape(
    m: int, weights: torch.Tensor, is_transposed: bool, configs: Iterable[SkinnyConfig]
) -> dict[SkinnyConfig | None, float]:
    """weights: `[sets, ...]` as they lie. Of cuBLAS, under None, and of every configuration."""
    sets = [one.t() if is_transposed else one for one in weights]
    k, n = sets[0].shape
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    out, count = torch.empty(m, n, device="cuda", dtype=torch.bfloat16), max(len(sets), LEAST_CALLS)
    calls: dict[SkinnyConfig | None, Callable[[int], object]] = {
        None: lambda turn: torch.mm(a, sets[turn % len(sets)], out=out),
    }
    for config in configs:
        base = stand_in_for(sets[0])
        memory = SharedShares(a.device)
        launch = Launch(skinny_call(config, SkinnyOperands(a, base, out), memory))

        def run(turn: int, launch: Launch = launch, base: Moving = base) -> None:
            base.address = sets[turn % len(sets)].data_ptr()
            launch.start(torch.cuda.current_stream().cuda_stream)

        calls[config] = run
    return times_us(calls, count)


class Told:
    """Prints a line for each shape, and keeps by how much the quickest beats cuBLAS."""

    def __init__(self, most: int) -> None:
        self.gains: dict[str, list[float]] = {}
        self._most = most

    def shape(self, shape: tuple[int, int, int], layout: str, took: dict[SkinnyConfig | None, float]) -> None:
        m, n, k = shape
        library_us, chosen = took.pop(None), skinny_shape(shape, SMS)
        best = sorted((one for one in took if one is not None), key=lambda config: took[config])
        for name, config in (("chosen", chosen), ("best", best[0])):
            self.gains.setdefault(f"m={m} {layout} {name}", []).append(library_us / took[config])
        rate, gain = 2 * n * k / took[chosen] / 1e3, library_us / took[chosen]
        told = f"{name_of(chosen)}={took[chosen]:.2f} {gain:.2f}x {rate:.0f} GB/s"
        others = " ".join(f"{name_of(one)}={took[one]:.2f}" for one in best[: self._most])
        print(f"{m:3d} {n:5d} {k:5d} {layout} cuBLAS {library_us:.2f} chosen {told} | {others}", flush=True)

    def end(self) -> None:
        for name, values in self.gains.items():
            print(f"{name}: {geometric_mean(values):.3f} x cuBLAS in geometric mean, worst {min(values):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m campaigns.gpu_skinny")
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--seconds", type=float, default=48.0, help="after which no further shape is begun")
    parser.add_argument("--told", type=int, default=10, help="how many of the quickest to print for each shape")
    asked = parser.parse_args()
    need_gpus()
    started, told = time.monotonic(), Told(asked.told)
    found = check_all()
    print(f"exact: {len(found)} wrong {found[:6]}, after {time.monotonic() - started:.0f} s", flush=True)
    empty = torch.zeros(1, device="cuda")
    print(f"a kernel with nothing to do: {times_us({'': lambda turn: empty.zero_()}, 20)['']:.2f} us")
    for n, k in LAYERS:
        sets = max(2, -(-COLD_BYTES // (2 * n * k)))
        stored = torch.empty(sets, n * k, device="cuda", dtype=torch.bfloat16).normal_()
        for layout in ("nk", "kn"):
            weights = stored.view(sets, n, k) if layout == "nk" else stored.view(sets, k, n)
            for m in asked.rows:
                if time.monotonic() - started > asked.seconds:
                    print(f"left out for time: {m} {n} {k} {layout}")
                    continue
                told.shape((m, n, k), layout, time_shape(m, weights, layout == "nk", candidates(m, n, k)))
        del stored
    told.end()
    print(f"verdict: {'wrong' if found else 'right'}, took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
