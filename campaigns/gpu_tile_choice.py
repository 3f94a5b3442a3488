"""Is the tile shape that the catalog chooses the best one, and how far is it from cuBLAS? On one GPU.

    python -m campaigns.gpu_tile_choice [--sets mlp gpt3 llm_layers] [--world 4] [--plain]

The local matmuls of both operators of each set, at 512 rows and more, in every tile shape of the Hopper kernel. First
each runs on integers, whose result is compared bit for bit. Then all are timed by turns on normal numbers, beside
cuBLAS with `b` in either layout, of which the better counts. `b` is transposed for ours, or with --plain row-major.
Ends with each tile shape's time per wave against the first one's, where neither has a narrow tile: the efficiencies of
schedules/tile_shape.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from math import exp, log
from statistics import median
from typing import NamedTuple

import torch

from campaigns.gpu_rates import made, make_normal, medians_us, operands, product
from overweave.ir.plan import MatmulConfig
from overweave.schedules.tile_shape import count_tiles, shapes, tile_shape, tiles_to_cut
from overweave.tuner.shapes import read_shapes

SETS = ("mlp", "gpt3", "llm_layers")
OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter")
LEAST_ROWS, MOST_TFLOP = 512, 2.8  # beyond this waves are so many that every tile shape fills them
MOST_TILES = 8192
SAMPLES = 9
CALL_US = 5.0  # of any launch: what a shape's waves do not explain
Shape = tuple[int, int, int]


class Timed(NamedTuple):
    """One tile shape at one matmul. waves: of whole tiles; 0 if some tile is narrow."""

    config: MatmulConfig
    time_us: float
    waves: int

    @property
    def name(self) -> str:
        return f"{self.config.block_m}x{self.config.block_n}/{self.config.split_n}"

    @property
    def wave_us(self) -> float:
        """Of a wave of tiles as large as 128 x 256."""
        return (self.time_us - CALL_US) / self.waves / (self.config.block_m * self.config.block_n) * 128 * 256


def local_shapes(sets: list[str], world_size: int) -> Iterator[Shape]:
    """`(m, n, k)` of one rank, each once."""
    seen = set[Shape]()
    for name in sets:
        for operator in OPERATORS:
            for case in read_shapes(name, operator).cases:
                problem = case.problem(operator, world_size, "bf16")
                shape = problem.m, problem.n, problem.k
                is_sized = problem.m >= LEAST_ROWS and 2e-12 * problem.m * problem.n * problem.k <= MOST_TFLOP
                if is_sized and shape not in seen:
                    seen.add(shape)
                    yield shape


def configs() -> list[MatmulConfig]:
    return [shape.config for shape in shapes("bfloat16", "hopper")]


def compile_one(config: MatmulConfig, is_transposed: bool, tile_rows: int) -> None:
    """Fills Triton's cache, from a process of its own. Kernels differ by whether 16 divides the number of tiles."""
    shape = tile_rows * config.block_m, config.block_n, 512
    a, b = operands(*shape, is_transposed)
    made(config, a, b, product(a, b))


def compile_all(is_transposed: bool) -> None:
    """Every kernel, in processes beside each other."""
    with ProcessPoolExecutor(16, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_one, config, is_transposed, rows) for config in configs() for rows in (16, 15)]
        for job in jobs:
            job.result()


def compare(shape: Shape, is_transposed: bool) -> tuple[float, list[Timed]]:
    """The better cuBLAS time in us, and every tile shape's. Raises AssertionError for a result that differs."""
    m, n, k = shape
    a, b = operands(m, n, k, is_transposed)
    tried = [config for config in configs() if -(-m // config.block_m) * -(-n // config.block_n) <= MOST_TILES]
    exact = product(a, b)
    matmuls = [made(config, a, b, exact) for config in tried]
    other = b.contiguous() if is_transposed else b.t().contiguous().t()
    make_normal(a, b)
    other.copy_(b)
    out = torch.empty_like(exact)
    library: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out), lambda: torch.mm(a, other, out=out)]
    first, second, *times = medians_us([*library, *matmuls], SAMPLES)
    waves = [whole_waves(m, n, config) for config in tried]
    return min(first, second), [Timed(*one) for one in zip(tried, times, waves, strict=True)]


def whole_waves(m: int, n: int, config: MatmulConfig) -> int:
    """How many waves of whole tiles a matmul has; 0 if any of its tiles is narrow."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    count = count_tiles((m,), n, config)
    return 0 if count.narrow or tiles_to_cut(count, sms, config) else -(-count.tiles // sms)


def print_efficiencies(found: list[list[Timed]]) -> None:
    """The median over the matmuls, and how many these are."""
    for config in configs():
        ratios = [
            timed[0].wave_us / one.wave_us
            for timed in found
            for one in timed
            if one.config == config and one.waves and timed[0].waves
        ]
        if ratios:
            name = Timed(config, 0.0, 0).name
            print(f"{name:10s} {median(ratios):6.3f} of {Timed(configs()[0], 0.0, 0).name} per wave, {len(ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m campaigns.gpu_tile_choice")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--plain", action="store_true", help="`b` row-major, not transposed")
    asked = parser.parse_args()
    compile_all(not asked.plain)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    chosen_shares, best_shares, found = [], [], []
    for m, n, k in local_shapes(asked.sets, asked.world):
        library_us, timed = compare((m, n, k), not asked.plain)
        choice = tile_shape((m,), n, sms, shapes("bfloat16", "hopper"))
        chosen = next(one for one in timed if one.config == choice)
        best = min(timed, key=lambda one: one.time_us)
        said = " ".join(
            f"{word} {one.name:9s} {one.time_us:8.1f} us {library_us / one.time_us:5.3f}"
            for word, one in (("chosen", chosen), ("best", best))
        )
        print(f"{m:5d}x{n:5d}x{k:5d}: cuBLAS {library_us:8.1f} us, {said}", flush=True)
        chosen_shares.append(library_us / chosen.time_us)
        best_shares.append(library_us / best.time_us)
        found.append(timed)
    for word, shares in (("chosen", chosen_shares), ("best", best_shares)):
        mean = exp(sum(map(log, shares)) / len(shares))
        print(f"{word}: {mean:.3f} of cuBLAS over {len(shares)} matmuls, the worst {min(shares):.3f}")
    print_efficiencies(found)


if __name__ == "__main__":
    main()
