"""Is fp8 right on GPUs, how far from the truth beside torch's scaled matmul, and how much quicker than bf16?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_fp8
    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_fp8 --operator matmul_reduce_scatter
    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_fp8 --no-times      (bits and errors only)

Integers first, whose every sum is exact, in every plan and with tensors that move; then random numbers against fp64;
then MLP-5 and MLP-6 (benchmarks/shapes) beside bf16, interleaved. Where rows are gathered, all of it again with a gate
and scales of its own, at a layer of Llama-3. It fails where a bit is wrong, where the error is more than 1.05 of
torch's, or where fp8 as overweave chooses to run it is not as much quicker than bf16 as it should: 1.4 times where rows
are gathered, at all where sums travel, in as many bytes as those of bf16, and where there is a gate.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.gpu_ranks import join, report, shard, spread_over
from overweave.ops import reference
from overweave.tuner.measure.statistics import median
from overweave.tuner.measure.timer import Call, Effort, compare

FP8 = torch.float8_e4m3fn
SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
TIMED = ("MLP-5", "MLP-6")
SIZES = ((1000, 1312, 528), (3000, 2752, 1040))  # m, n, k: ragged rows, and a last step of k that is not whole
LARGEST = 448.0  # of e4m3
ERROR_RATIO = 1.05
GATE_UP = "Llama-3-8B.gate_up.m=8192"  # of benchmarks/shapes/weights.*
CHECKED_COLUMNS = 256  # of a product that is held against fp64
NON_ZEROS = 32  # in a row of x, about: so few that sums over ranks are exact in 16 bits, in any order
EFFORT = Effort(rounds=20, warmup=4, host_calls=0)

Sizes = tuple[int, int, int]


class Operator(NamedTuple):
    """What is checked of an operator. fused: plans whose tiles are held against fp64, and timed. alone: on one GPU."""

    plans: tuple[str, ...]
    fused: tuple[str, ...]
    speed_ratio: float

    @property
    def alone(self) -> tuple[str, ...]:
        return self.plans[0], *self.fused[:2]


GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
_GATHERED = ("push kernel=hopper", "push kernel=portable", "pull kernel=hopper pieces=2")
_SCATTERED = ("scatter kernel=hopper", "scatter kernel=portable", "scatter kernel=hopper pieces=2 sums=epilogue")
_REDUCED = ("two_shot kernel=hopper", "two_shot kernel=portable", "two_shot kernel=hopper pieces=2 sums=epilogue")
GATED = ("sequential", *_GATHERED, "push kernel=hopper split_k=2", "push kernel=portable split_k=2")
OPERATORS = {
    GATHER: Operator(
        ("sequential", "per_shard", *_GATHERED, "push kernel=hopper mover=copy_kernel"),
        _GATHERED,
        speed_ratio=1.4,
    ),
    SCATTER: Operator(
        (
            *("sequential", "per_shard", *_SCATTERED, "scatter kernel=portable sums=epilogue"),
            *("scatter kernel=hopper own_pieces=2", "scatter kernel=hopper mover=copy_kernel"),
            *("scatter_stored kernel=hopper", "scatter_stored kernel=portable", "ring_stored kernel=hopper"),
            *("fused_ring kernel=hopper", "fused_ring kernel=portable"),
            *("scatter_pull kernel=hopper", "scatter_pull kernel=portable"),
        ),
        _SCATTERED,
        speed_ratio=1.0,
    ),
    REDUCE: Operator(
        (
            *("sequential", "one_shot_packed"),
            *(
                "ring_stored kernel=hopper",
                "two_shot_packed",
                *_REDUCED,
            ),
        ),
        _REDUCED,
        speed_ratio=1.0,
    ),
}


class Tensors(NamedTuple):
    """This rank's x, its weight, and their scales: fp32 `[rows, 1]` and `[1, n]`, or one of each."""

    operator: str
    x: torch.Tensor
    w: torch.Tensor
    scale_x: torch.Tensor
    scale_w: torch.Tensor

    def product(self, m: int, plan: str | None, out: torch.dtype = torch.bfloat16) -> torch.Tensor:
        extras = ow.Extras(scale_x=self.scale_x, scale_w=self.scale_w, out_dtype=out)
        return run(self.operator, self.x, self.w, m, plan, extras)

    def exact(self, m: int) -> torch.Tensor:
        """The result in the dtype of the scales."""
        if self.operator == GATHER:
            return reference.all_gather_scaled_matmul(self.x, self.w, self.scale_x, self.scale_w, m=m)
        total = reference.scaled_matmul_all_reduce(self.x, self.w, self.scale_x, self.scale_w)
        return shard(total) if self.operator == SCATTER else total


def run(
    operator: str, x: torch.Tensor, w: torch.Tensor, m: int, plan: str | None, extras: ow.Extras | None = None
) -> torch.Tensor:
    if operator == GATHER:
        return ow.all_gather_matmul(x, w, m=m, extras=extras, plan=plan)
    if operator == SCATTER:
        return ow.matmul_reduce_scatter(x, w, extras=extras, plan=plan)
    return ow.matmul_all_reduce(x, w, extras=extras, plan=plan)


def held(operator: str, x: torch.Tensor) -> torch.Tensor:
    """What a rank passes of the rows of x."""
    return shard(x) if operator == GATHER else x


def integers(operator: str, sizes: Sizes, by_rows: bool) -> Tensors:
    """Integers that fp8 holds, and powers of two as scales: of sums, small ones, each rank's own."""
    (m, n, k), is_sum = sizes, operator != GATHER
    most = 1 if is_sum else 2
    x = torch.randint(-most, most + 1, (m, k), device="cuda")
    x *= torch.rand(m, k, device="cuda") < (NON_ZEROS / k if is_sum else 1.0)
    w = torch.randint(-most, most + 1, (n, k), device="cuda").to(FP8).t()
    own = held(operator, x.to(FP8))
    if not by_rows:
        by = 2.0 ** (dist.get_rank() % 2) if is_sum else 0.5
        return Tensors(operator, own, w, torch.tensor([by], device="cuda"), torch.tensor([0.5], device="cuda"))
    powers = (0, 2) if is_sum else (-2, 3)
    by_row, by_column = (2.0 ** torch.randint(*powers, shape, device="cuda") for shape in ((m, 1), (1, n)))
    return Tensors(operator, own, w, held(operator, by_row), by_column)


def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in fp8, each with its scale `[rows, 1]`."""
    scales = rows.abs().amax(dim=1, keepdim=True).float() / LARGEST
    return (rows / scales).to(FP8), scales


def normals(operator: str, m: int, n: int, k: int) -> Tensors:
    """Standard normal numbers, quantized by row of x and column of w."""
    x, scale_x = quantized(held(operator, torch.randn(m, k, device="cuda")))
    w, scale_w = quantized(torch.randn(n, k, device="cuda"))
    return Tensors(operator, x, w.t(), scale_x, scale_w.t().contiguous())


def check_exactness(operator: str, plan: str, sizes: Sequence[Sizes]) -> None:
    """Every bit, in two sets of tensors by turns."""
    started, failures, count = time.monotonic(), [], 0
    wider = torch.float32 if plan == "sequential" else torch.float16
    for each, (by_rows, out) in product(sizes, ((True, torch.bfloat16), (False, torch.bfloat16), (True, wider))):
        both = integers(operator, each, by_rows), integers(operator, each, by_rows)
        for turn in range(4):
            given, count = both[turn % 2], count + 1
            if not torch.equal(given.product(each[0], plan, out), given.exact(each[0]).to(out)):
                failures.append(f"{plan} {'x'.join(map(str, each))} by_rows={by_rows} {out} call {turn}")
    report.line(f"exact: {plan}", count, failures, started)


def check_several(plan: str, m: int, n: int, k: int) -> None:
    """Products by three weights over one gather, each with its columns of the scales: every bit."""
    started, failures, columns = time.monotonic(), [], (n - 160, 128, 32)
    for turn in range(4):
        given = integers(GATHER, (m, n, k), by_rows=True)
        extras = ow.Extras(scale_x=given.scale_x, scale_w=given.scale_w)
        ys = ow.all_gather_matmul(given.x, given.w.split(columns, dim=1), m=m, extras=extras, plan=plan)
        if not torch.equal(torch.cat(ys, dim=1), given.exact(m).bfloat16()):
            failures.append(f"{plan} {m}x{columns}x{k} call {turn}")
    report.line(f"exact: {plan}, three weights", 4, failures, started)


class Gated(NamedTuple):
    """A product and that of a gate, with the scales of both, the gate's behind the other's."""

    given: Tensors
    gate: torch.Tensor
    scale_w: torch.Tensor

    @classmethod
    def of(cls, given: Tensors, gate: Tensors) -> Gated:
        return cls(given, gate.w, torch.cat([given.scale_w.flatten(), gate.scale_w.flatten()])[None])

    def product(self, m: int, plan: str | None, activation: str | None = None) -> torch.Tensor:
        extras = ow.Extras(gate=self.gate, activation=activation, scale_x=self.given.scale_x, scale_w=self.scale_w)
        return ow.all_gather_matmul(self.given.x, self.given.w, m=m, extras=extras, plan=plan)


def check_gate(plan: str, m: int, n: int, k: int) -> None:
    """Without an activation, so that every product is exact in fp32: a kernel rounds it once, a library each part."""
    started, failures = time.monotonic(), []
    both = [[integers(GATHER, (m, n, k), by_rows) for _ in range(3)] for by_rows in (True, False)]
    for turn in range(8):
        one, *others = both[turn % 2]
        other = others[turn // 2 % 2]
        other = one._replace(w=other.w, scale_w=other.scale_w * 4)
        gated, parts = Gated.of(one, other), (one.exact(m), other.exact(m))
        exact = parts[0] * parts[1] if "kernel=" in plan else parts[0].bfloat16() * parts[1].bfloat16()
        if not torch.equal(gated.product(m, plan), exact.bfloat16()):
            failures.append(f"{plan} {m}x{n}x{k} call {turn}")
    report.line(f"exact: {plan}, a gate", 8, failures, started)


def check_gate_errors(m: int, n: int, k: int) -> None:
    """SwiGLU against fp64 on the same fp8 numbers, beside what a library makes of it."""
    started, failures = time.monotonic(), []
    gated = Gated.of(*(normals(GATHER, m, n, k) for _ in range(2)))
    first = slice(CHECKED_COLUMNS)
    kept = [each[:, first].double() for each in (gated.given.w, gated.gate)]
    scales = torch.cat([each[:, first] for each in gated.scale_w.chunk(2, dim=1)], dim=1).double()
    wide = gated.given.x.double(), (kept[0], kept[1]), gated.given.scale_x.double(), scales
    exact = reference.all_gather_scaled_gated_matmul(*wide, m=m, activation="silu")

    def error(y: torch.Tensor) -> float:
        return float((y[:, first].double() - exact).norm() / exact.norm())

    torchs = error(gated.product(m, "sequential", "silu"))
    for plan in (None, *_GATHERED):
        ours = error(gated.product(m, plan, "silu"))
        if not ours <= ERROR_RATIO * torchs:
            failures.append(f"{plan}: error {ours:.3e}, torch's {torchs:.3e}")
        if dist.get_rank() == 0:
            print(f"    error of {plan or 'the chosen plan'}: {ours:.3e}, torch's {torchs:.3e}", flush=True)
    report.line(f"error of a gate at {m}x{n}x{k}", 1 + len(_GATHERED), failures, started)


def check_gate_times(name: str, m: int, n: int, k: int) -> None:
    """SwiGLU in fp8, as it is chosen and by plans, beside bf16."""
    started = time.monotonic()
    gated = Gated.of(*(normals(GATHER, m, n, k) for _ in range(2)))
    x = held(GATHER, torch.randn(m, k, device="cuda").bfloat16())
    w, gate = (torch.randn(n, k, device="cuda").bfloat16().t() for _ in range(2))
    in_bf16 = ow.Extras(gate=gate, activation="silu")
    methods: dict[str, Call] = {
        "bf16": lambda turn: run(GATHER, x, w, m, None, in_bf16),
        "fp8": lambda turn: gated.product(m, None, "silu"),
    }
    methods |= {f"fp8 {plan}": partial(_gated, gated, m, plan) for plan in GATED}
    check_gain(f"{name} {m}x{n}x{k}", methods, 1.0, started)


def _gated(gated: Gated, m: int, plan: str, turn: int) -> torch.Tensor:
    return gated.product(m, plan, "silu")


def check_errors(operator: str, m: int, n: int, k: int) -> None:
    """Against fp64 on the same fp8 numbers, beside torch's scaled matmul and the library's collective."""
    started, failures, given = time.monotonic(), [], normals(operator, m, n, k)
    first = slice(CHECKED_COLUMNS)
    wide = (given.x.double(), given.w[:, first].double(), given.scale_x.double(), given.scale_w[:, first].double())
    exact = Tensors(operator, *wide).exact(m)

    def error(y: torch.Tensor) -> float:
        return float((y[:, first].double() - exact).norm() / exact.norm())

    torchs, fused = error(given.product(m, "sequential")), OPERATORS[operator].fused
    for plan in (None, *fused):
        ours = error(given.product(m, plan))
        if not ours <= ERROR_RATIO * torchs:
            failures.append(f"{plan}: error {ours:.3e}, torch's {torchs:.3e}")
        if dist.get_rank() == 0:
            print(f"    error of {plan or 'the chosen plan'}: {ours:.3e}, torch's {torchs:.3e}", flush=True)
    report.line(f"error at {m}x{n}x{k}", 1 + len(fused), failures, started)


def check_times(operator: str, name: str, m: int, n: int, k: int) -> None:
    """fp8 as it is chosen, and by plans, beside bf16 and the two matmuls alone."""
    started, given = time.monotonic(), normals(operator, m, n, k)
    whole, w = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16().t()
    x, eights = held(operator, whole), normals(SCATTER, m, n, k)  # all rows, as what ends with a sum has them
    methods: dict[str, Call] = {
        "bf16": lambda turn: run(operator, x, w, m, None),
        "fp8": lambda turn: given.product(m, None),
        "bf16 matmul alone": lambda turn: torch.mm(whole, w),
        "fp8 matmul alone": lambda turn: torch._scaled_mm(
            eights.x, eights.w, eights.scale_x, eights.scale_w, out_dtype=torch.bfloat16
        ),
    }
    checked = OPERATORS[operator]
    others = [plan for plan in checked.plans[:3] if not plan.startswith("one_shot")]
    methods |= {f"fp8 {plan}": _planned(given, m, plan) for plan in (*others, *checked.fused)}
    check_gain(f"{name} {m}x{n}x{k}", methods, checked.speed_ratio, started)


def check_gain(name: str, methods: dict[str, Call], least: float, started: float) -> None:
    """Times methods, interleaved: `fp8` must be `least` times as fast as `bf16`."""
    for call in methods.values():
        call(0)
    times = {method: median(us) for method, us in _compared(methods).items()}
    gain = times["bf16"] / times["fp8"]
    failures = [] if gain >= least else [f"{name}: fp8 is {gain:.3f} times as fast as bf16"]
    if dist.get_rank() == 0:
        print("\n".join(f"    {name} {method:46s} {us:9.1f} us" for method, us in times.items()), flush=True)
    report.line(f"{name}: fp8 {gain:.3f} times as fast as bf16", 1, failures, started)


def _planned(given: Tensors, m: int, plan: str) -> Call:
    return lambda turn: given.product(m, plan)


def _compared(methods: dict[str, Call]) -> dict[str, tuple[float, ...]]:
    device = torch.device("cuda", torch.cuda.current_device())
    return compare(methods, device, dist.group.WORLD, EFFORT).device_us


def local(operator: str, case: dict[str, int]) -> Sizes:
    """One rank's matmul of a global one."""
    ranks = dist.get_world_size()
    if operator == GATHER:
        return case["m"], case["n"] // ranks, case["k"]
    return case["m"], case["n"], case["k"] // ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operator", choices=(*OPERATORS, "all"), default=GATHER, help="one, or all three")
    parser.add_argument("--no-times", action="store_true", help="leave out what is timed beside bf16")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the sizes must be exact")
    arguments = parser.parse_args()
    join(timedelta(seconds=60))
    torch.manual_seed(dist.get_rank())
    for operator in OPERATORS if arguments.operator == "all" else (arguments.operator,):
        if dist.get_rank() == 0:
            print(operator, flush=True)
        check(operator, spread_over(SIZES, arguments.sizes), not arguments.no_times)
    report.finish()


def check(operator: str, sizes: Sequence[Sizes], is_timed: bool) -> None:
    """Bits, errors and, if asked, times of an operator."""
    checked = OPERATORS[operator]
    for plan in checked.plans if dist.get_world_size() > 1 else checked.alone:
        check_exactness(operator, plan, sizes)
        if operator == GATHER:
            check_several(plan, *sizes[0])
    cases = json.loads((SHAPES / f"mlp.{operator}.json").read_text())["cases"]
    for case in (case for case in cases if case["name"] in TIMED):
        if case["name"] == TIMED[0]:
            check_errors(operator, *local(operator, case))
        if is_timed:
            check_times(operator, case["name"], *local(operator, case))
    if operator == GATHER:
        check_gates(sizes[0], is_timed)


def check_gates(sizes: Sizes, is_timed: bool) -> None:
    """Bits, errors and, if asked, times of products with a gate."""
    m, n, k = sizes
    for plan in GATED if dist.get_world_size() > 1 else ("sequential", *_GATHERED[:2]):
        check_gate(plan, m, n, 2 * k)  # as much as two shares of tiles have
    cases = json.loads((SHAPES / f"weights.{GATHER}.json").read_text())["cases"]
    extents = next(local(GATHER, case) for case in cases if case["name"] == GATE_UP)
    check_gate_errors(*extents)
    if is_timed:
        check_gate_times(GATE_UP, *extents)


if __name__ == "__main__":
    main()
