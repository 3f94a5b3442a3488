"""Is fp8 right on GPUs, how far from the truth beside torch's scaled matmul, and how much quicker than bf16?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_fp8
    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_fp8 --no-times      (bits and errors only)

Integers first, whose every sum is exact, in every plan and with tensors that move; then random numbers against fp64;
then MLP-5 and MLP-6 (benchmarks/shapes) beside bf16, interleaved. It fails where a bit is wrong, where the error
is more than 1.05 of torch's, or where fp8 as overweave chooses to run it takes more than 1/1.4 of the time of bf16.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.gpu_ranks import join, report, shard, spread_over
from overweave.ops import reference
from overweave.tuner.statistics import median
from overweave.tuner.timer import Call, Effort, compare

FP8 = torch.float8_e4m3fn
SHAPES = Path(__file__).parent.parent / "benchmarks" / "shapes" / "mlp.all_gather_matmul.json"
TIMED = ("MLP-5", "MLP-6")
FUSED = ("push kernel=hopper", "push kernel=portable", "pull kernel=hopper pieces=2")
PLANS = ("sequential", "per_shard", "gather", "gather_pull", *FUSED, "push kernel=hopper mover=copy_kernel")
SIZES = ((1000, 1312, 528), (3000, 2752, 1040))  # m, n, k: ragged rows, and a last step of k that is not whole
LARGEST = 448.0  # of e4m3
ERROR_RATIO, SPEED_RATIO = 1.05, 1.4
CHECKED_COLUMNS = 256  # of a product that is held against fp64
EFFORT = Effort(rounds=20, warmup=4, host_calls=0)

Sizes = tuple[int, int, int]


class Tensors(NamedTuple):
    """This rank's shard, its weight, and their scales: fp32 `[rows, 1]` and `[1, n]`, or one of each."""

    x: torch.Tensor
    w: torch.Tensor
    scale_x: torch.Tensor
    scale_w: torch.Tensor

    def product(self, m: int, plan: str | None, out: torch.dtype = torch.bfloat16) -> torch.Tensor:
        extras = ow.Extras(scale_x=self.scale_x, scale_w=self.scale_w, out_dtype=out)
        return ow.all_gather_matmul(self.x, self.w, m=m, extras=extras, plan=plan)


def integers(m: int, n: int, k: int, by_rows: bool) -> Tensors:
    """Integers that fp8 holds, and powers of two as scales."""
    x = torch.randint(-2, 3, (m, k), device="cuda").to(FP8)
    w = torch.randint(-2, 3, (n, k), device="cuda").to(FP8).t()
    if not by_rows:
        return Tensors(shard(x), w, torch.tensor([0.5], device="cuda"), torch.tensor([4.0], device="cuda"))
    by_row, by_column = (2.0 ** torch.randint(-2, 3, shape, device="cuda") for shape in ((m, 1), (1, n)))
    return Tensors(shard(x), w, shard(by_row), by_column)


def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in fp8, each with its scale `[rows, 1]`."""
    scales = rows.abs().amax(dim=1, keepdim=True).float() / LARGEST
    return (rows / scales).to(FP8), scales


def normals(m: int, n: int, k: int) -> Tensors:
    """Standard normal numbers, quantized by row of x and column of w."""
    x, scale_x = quantized(shard(torch.randn(m, k, device="cuda")))
    w, scale_w = quantized(torch.randn(n, k, device="cuda"))
    return Tensors(x, w.t(), scale_x, scale_w.t().contiguous())


def check_exactness(plan: str, sizes: Sequence[Sizes]) -> None:
    """Every bit, in two sets of tensors by turns."""
    started, failures, count = time.monotonic(), [], 0
    wider = torch.float32 if plan == "sequential" else torch.float16
    for (m, n, k), (by_rows, out) in product(sizes, ((True, torch.bfloat16), (False, torch.bfloat16), (True, wider))):
        both = integers(m, n, k, by_rows), integers(m, n, k, by_rows)
        for turn in range(4):
            given, count = both[turn % 2], count + 1
            exact = reference.all_gather_scaled_matmul(given.x, given.w, given.scale_x, given.scale_w, m=m)
            if not torch.equal(given.product(m, plan, out), exact.to(out)):
                failures.append(f"{plan} {m}x{n}x{k} by_rows={by_rows} {out} call {turn}")
    report.line(f"exact: {plan}", count, failures, started)


def check_errors(m: int, n: int, k: int) -> None:
    """Against fp64 on the same fp8 numbers, beside torch's scaled matmul on what a library gathered."""
    started, failures, given = time.monotonic(), [], normals(m, n, k)
    columns = given.w[:, :CHECKED_COLUMNS]
    wide = (given.x.double(), columns.double(), given.scale_x.double(), given.scale_w[:, :CHECKED_COLUMNS].double())
    exact = reference.all_gather_scaled_matmul(*wide, m=m)

    def error(y: torch.Tensor) -> float:
        return float((y[:, :CHECKED_COLUMNS].double() - exact).norm() / exact.norm())

    torchs = error(given.product(m, "sequential"))
    for plan in (None, *FUSED):
        ours = error(given.product(m, plan))
        if not ours <= ERROR_RATIO * torchs:
            failures.append(f"{plan}: error {ours:.3e}, torch's {torchs:.3e}")
        if dist.get_rank() == 0:
            print(f"    error of {plan or 'the chosen plan'}: {ours:.3e}, torch's {torchs:.3e}", flush=True)
    report.line(f"error at {m}x{n}x{k}", 1 + len(FUSED), failures, started)


def check_times(name: str, m: int, n: int, k: int) -> None:
    """fp8 as it is chosen, and by plans, beside bf16 and the two matmuls alone."""
    started, given = time.monotonic(), normals(m, n, k)
    x, w = shard(torch.randn(m, k, device="cuda").bfloat16()), torch.randn(n, k, device="cuda").bfloat16().t()
    whole, eights = torch.randn(m, k, device="cuda").bfloat16(), normals(m * dist.get_world_size(), n, k)
    methods: dict[str, Call] = {
        "bf16": lambda turn: ow.all_gather_matmul(x, w, m=m),
        "fp8": lambda turn: given.product(m, None),
        "bf16 matmul alone": lambda turn: torch.mm(whole, w),
        "fp8 matmul alone": lambda turn: torch._scaled_mm(
            eights.x, eights.w, eights.scale_x, eights.scale_w, out_dtype=torch.bfloat16
        ),
    }
    methods |= {f"fp8 {plan}": _planned(given, m, plan) for plan in ("per_shard", "gather", *FUSED)}
    for call in methods.values():
        call(0)
    times = {method: median(us) for method, us in _compared(methods).items()}
    gain = times["bf16"] / times["fp8"]
    failures = [] if gain >= SPEED_RATIO else [f"{name}: fp8 is {gain:.3f} times as fast as bf16"]
    if dist.get_rank() == 0:
        print("\n".join(f"    {name} {method:36s} {us:9.1f} us" for method, us in times.items()), flush=True)
    report.line(f"{name} {m}x{n}x{k}: fp8 {gain:.3f} times as fast as bf16", 1, failures, started)


def _planned(given: Tensors, m: int, plan: str) -> Call:
    return lambda turn: given.product(m, plan)


def _compared(methods: dict[str, Call]) -> dict[str, tuple[float, ...]]:
    device = torch.device("cuda", torch.cuda.current_device())
    return compare(methods, device, dist.group.WORLD, EFFORT).device_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-times", action="store_true", help="leave out what is timed beside bf16")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the sizes must be exact")
    arguments = parser.parse_args()
    join(timedelta(seconds=60))
    torch.manual_seed(dist.get_rank())
    for plan in PLANS if dist.get_world_size() > 1 else ("sequential", *FUSED[:2]):
        check_exactness(plan, spread_over(SIZES, arguments.sizes))
    cases = [case for case in json.loads(SHAPES.read_text())["cases"] if case["name"] in TIMED]
    for case in cases:
        sizes = case["m"], case["n"] // dist.get_world_size(), case["k"]
        if case["name"] == TIMED[0]:
            check_errors(*sizes)
        if not arguments.no_times:
            check_times(case["name"], *sizes)
    report.finish()


if __name__ == "__main__":
    main()
