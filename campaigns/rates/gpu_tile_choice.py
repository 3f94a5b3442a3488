"""Is the tile shape that the catalog chooses the best one, and how far is it from cuBLAS? On one GPU.

    python -m campaigns.gpu_tile_choice [--sets mlp gpt3 llm_layers | --random N --seed S --multiple M] [--rows A:B]
                                        [--chosen] [--pitch P] [--library] [--plain] [--times FILE] [--old FILE]

The local matmuls of both operators of each set, by default at 512 rows and more, or random ones, of columns and a k
from 512 to 16,384 that are multiples of 8 or of M, whose chosen tiles are held to a share of cuBLAS; in every tile
shape of the Hopper kernel. First each runs on integers, over ragged sizes too, and its result is compared bit for bit.
Then all are timed by turns on normal numbers, beside cuBLAS with `b` in either layout, of which the better counts.
`b` is transposed for ours, or with --plain row-major. --times: every time, a line of JSON for each matmul, from
which campaigns/rates/tile_fit.py draws the constants of the model. --old: such a file of another commit, which these
times are held against. --chosen: the tile shape alone that the model takes: seconds, not minutes.
--pitch: rows of both operands begin at multiples of P elements, whatever k is. --library: the names of the kernels that
cuBLAS launches.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random

import msgspec
import torch
from msgspec.structs import replace
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from campaigns.gpu_ranks import need_gpus
from campaigns.rates.operands import check_ragged, checked_matmul, make_normal, operands, product
from campaigns.rates.tile_fit import Record, Shape, Times, chosen, efficiencies
from campaigns.verdict import Verdict, tell
from overweave.ir.plan import MatmulConfig
from overweave.schedules.records.needs import ALIGNED
from overweave.schedules.records.record import MethodRequest
from overweave.schedules.tiles.shape import HOPPER, count_tiles, shapes
from overweave.tuner.calibrate.rates import medians_us
from overweave.tuner.measure.timer import geometric_mean
from overweave.tuner.space.shapes import read_shapes
from overweave.tuner.space.target import Target

SETS = ("mlp", "gpt3", "llm_layers")
OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter")
LEAST_ROWS, MOST_TFLOP = 512, 2.8  # beyond this waves are so many that every tile shape fills them
MOST_TILES = 8192
SHORTER_STEPS = (HOPPER[0].config, HOPPER[2].config, HOPPER[4].config)
DRAWN = range(512, 16384 + 1)  # columns and k of a random matmul
LEAST_MEAN, LEAST_EACH = 0.97, 0.9  # of cuBLAS, for what is chosen of random matmuls


def local_shapes(sets: list[str], world_size: int, rows: range = range(LEAST_ROWS, 1 << 30)) -> Iterator[Shape]:
    """`(m, n, k)` of one rank, each once. Where the operators leave rows to the library, that is said instead."""
    seen = set[Shape]()
    for name in sets:
        for operator in OPERATORS:
            for case in read_shapes(name, operator).cases:
                problem = case.problem(operator, world_size, "bf16")
                shape = problem.m, problem.n, problem.k
                is_sized = problem.m in rows
                is_sized &= 2e-12 * problem.m * problem.n * problem.k <= MOST_TFLOP
                if not is_sized or shape in seen:
                    continue
                seen.add(shape)
                if why := ALIGNED.why(MethodRequest(problem, {}, Target("cuda"))):
                    print(f"{operator} {case.name}: no tile kernel: {why}", flush=True)
                else:
                    yield shape


def random_shapes(count: int, rows: range, seed: int, multiple: int = 8) -> list[Shape]:
    """So many `(m, n, k)`, none larger than those of sets. multiple: of which n and k are."""
    random, found, drawn = Random(seed), list[Shape](), DRAWN[::multiple]
    while len(found) < count:
        m, n, k = random.choice(rows), random.choice(drawn), random.choice(drawn)
        if 2e-12 * m * n * k <= MOST_TFLOP:
            found.append((m, n, k))
    return found


def rows_of(words: str) -> range:
    """`A:B`, both ends included."""
    low, high = map(int, words.split(":"))
    return range(low, high + 1)


def configs() -> list[MatmulConfig]:
    """The catalog's tile shapes, and others to try: twice as many steps of half the length, in as much memory."""
    known = [shape.config for shape in shapes("bfloat16", "hopper")]
    halved = [replace(one, block_k=32, stages=min(2 * one.stages, 8)) for one in known if one in SHORTER_STEPS]
    return [*known, *halved]


def candidates(shape: Shape, sms: int, is_chosen: bool = False) -> list[MatmulConfig]:
    """Every tile shape; or the one that the model takes."""
    m, n, _ = shape
    fit = (config for config in configs() if count_tiles((m,), n, config).tiles <= MOST_TILES)
    return [chosen(shape, sms)] if is_chosen else list(fit)


def compile_one(config: MatmulConfig, is_transposed: bool, tile_rows: int) -> None:
    """Fills Triton's cache, from a process of its own. Kernels differ by whether 16 divides the number of rows."""
    shape = tile_rows * config.block_m, config.block_n, 1024
    a, b = operands(*shape, is_transposed)
    checked_matmul(config, a, b, product(a, b))


def compile_all(kernels: list[MatmulConfig], is_transposed: bool) -> None:
    """The kernels, in processes beside each other."""
    with ProcessPoolExecutor(16, mp_context=multiprocessing.get_context("spawn")) as pool:
        each = dict.fromkeys(kernels)
        jobs = [pool.submit(compile_one, config, is_transposed, rows) for config in each for rows in (16, 15)]
        for job in jobs:
            job.result()


def at_pitch(matrix: torch.Tensor, pitch: int) -> torch.Tensor:
    """The same matrix `[rows, cols]`, with rows (columns, if transposed) that begin at multiples of pitch elements."""
    if matrix.stride(1) != 1:
        return at_pitch(matrix.t(), pitch).t()
    rows, cols = matrix.shape
    wide = torch.zeros(rows, -(-cols // pitch) * pitch, dtype=matrix.dtype, device=matrix.device)
    wide[:, :cols] = matrix
    return wide[:, :cols]


def library_kernels(calls: list[Callable[[], object]]) -> list[str]:
    """The names of the kernels that each call launches."""
    names = []
    for call in calls:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        on_device = (event for event in seen.events() if event.device_type == DeviceType.CUDA)
        names.append(" + ".join(event.name for event in on_device))
    return names


def compare(shape: Shape, tried: list[MatmulConfig], is_transposed: bool, pitch: int, names_library: bool) -> Times:
    """Their times in us. Raises AssertionError for a result that differs."""
    m, n, k = shape
    a, b = (at_pitch(one, pitch) for one in operands(m, n, k, is_transposed))
    exact = product(a, b)
    matmuls = [checked_matmul(one, a, b, exact) for one in tried]
    other = b.contiguous() if is_transposed else b.t().contiguous().t()
    make_normal(a, b)
    other.copy_(b)
    out = torch.empty_like(exact)
    library: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out), lambda: torch.mm(a, other, out=out)]
    if names_library:
        print("; ".join(library_kernels(library)))
    first, second, *times = medians_us([*library, *matmuls])
    return Times(m, n, k, min(first, second), dict(zip(tried, times, strict=True)))


def against(found: list[Times], old: Path) -> str:
    """The times beside those that another commit wrote, shape by shape and tile by tile; and both as shares of the
    library's times beside them, as the clocks of a GPU change from minute to minute."""
    lines = (msgspec.json.decode(line, type=Record).times for line in old.read_bytes().splitlines())
    before = {times.shape: times for times in lines}
    both = [
        (times, was, one) for times in found if (was := before.get(times.shape)) for one in times.us if one in was.us
    ]
    ratios = [times.us[one] / was.us[one] for times, was, one in both]
    shares = [ratio * was.library_us / times.library_us for ratio, (times, was, _) in zip(ratios, both, strict=True)]
    means = f"{geometric_mean(ratios):.4f}, as shares of the library's {geometric_mean(shares):.4f}"
    return f"times to those of {old.name}: {means} in the geometric mean over {len(ratios)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m campaigns.gpu_tile_choice")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many random matmuls, in place of sets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--multiple", type=int, default=8, metavar="M", help="of which random columns and k are")
    parser.add_argument("--pitch", type=int, default=1, metavar="P", help="rows begin at multiples of P elements")
    parser.add_argument("--library", action="store_true", help="name the kernels of cuBLAS")
    parser.add_argument("--rows", type=rows_of, default=range(LEAST_ROWS, 1 << 30), metavar="A:B")
    parser.add_argument("--chosen", action="store_true", help="the tile shape that the model takes, and no other")
    parser.add_argument("--plain", action="store_true", help="`b` row-major, not transposed")
    parser.add_argument("--times", type=Path, help="where to write every time")
    parser.add_argument("--old", type=Path, help="times that another commit wrote, to hold these against")
    asked = parser.parse_args()
    need_gpus()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    if asked.random:
        sizes = random_shapes(asked.random, asked.rows, asked.seed, asked.multiple)
    else:
        sizes = list(local_shapes(asked.sets, asked.world, asked.rows))
    tried = {shape: candidates(shape, sms, asked.chosen) for shape in sizes}
    compile_all([one for each in tried.values() for one in each] if asked.chosen else configs(), not asked.plain)
    if not asked.chosen:
        check_ragged(configs())
    shares: dict[str, list[float]] = {"chosen": [], "best": []}
    found = []
    for shape in sizes:
        times = compare(shape, tried[shape], not asked.plain, asked.pitch, asked.library)
        picked = {"chosen": chosen(shape, sms), "best": min(times.us, key=lambda one: times.us[one])}
        said = ", ".join(f"{word} {times.said(one)}" for word, one in picked.items())
        print(f"{times.shape}: cuBLAS {times.library_us:8.1f} us, {said}", flush=True)
        for word, one in picked.items():
            shares[word].append(times.library_us / times.us[one])
        found.append(times)
        if asked.times:
            with asked.times.open("ab") as file:
                file.write(msgspec.json.encode(times.record()) + b"\n")
    if not asked.chosen:
        for line in efficiencies(found, configs(), sms):
            print(line)
    if asked.old:
        print(against(found, asked.old))
    for word, each in shares.items():
        reached = sum(share >= 0.97 for share in each)
        told = f"{len(each)}, {reached} at 0.97, the worst {min(each):.3f}"
        print(f"{word}: {geometric_mean(each):.3f} of cuBLAS over {told}")
    if asked.random:
        sys.exit(tell([verdict(shares["chosen"], f"seed {asked.seed}")]))


def verdict(shares: list[float], of: str) -> Verdict:
    """Whether what is chosen is as quick as it should be beside cuBLAS."""
    mean, worst = geometric_mean(shares), min(shares)
    told = (
        f"{mean:.3f} of cuBLAS (at least {LEAST_MEAN}), worst {worst:.3f} (at least {LEAST_EACH}), {len(shares)} shapes"
    )
    return Verdict(f"chosen tiles, {of}", told, mean >= LEAST_MEAN and worst >= LEAST_EACH)


if __name__ == "__main__":
    main()
