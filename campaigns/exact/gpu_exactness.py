"""Are results right on GPUs? Every operator through its public face, every result compared on the device.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_exactness --shapes 200 --calls 1000 --replays 1000 \\
        [--plans split_k --set ""]

Integer data in {-1, 0, 1} with at most 32 non-zeros along the global k: every partial and total is exact, so results
are bit-equal. Float data: at most 1.05 times the error of torch + NCCL against fp64. Outputs start as NaN, inputs
change at every call, a random rank is late.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.gpu_ranks import join, report
from overweave.ir.shards import shard_rows
from overweave.ops import reference
from overweave.tuner.space.shapes import read_shapes

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OPERATORS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
PLANS = {
    ALL_GATHER: (
        None,
        "push",
        "push pieces=4",
        "push kernel=hopper block_m=128 block_n=192 split_n=3 stages=4",
        "push kernel=hopper block_m=128 block_n=256 split_n=4 stages=3 sms=24",  # whose last waves are quarters
        "push kernel=hopper block_m=128 block_n=160 stages=5 sms=24",
        "push kernel=hopper block_m=128 block_n=160 stages=5 split_k=3",
        "push split_k=3",
        "push split_k=8 kernel=hopper block_m=128 block_n=192 split_n=3 stages=4",
        "push split_k=2 kernel=portable",
        "push kernel=portable",
        "push mover=copy_kernel",
        "push mover=copy_kernel copy_programs=4 pieces=4 order=all_peers",
        "push mover=copy_kernel kernel=portable",
        "gather_packed",
        "pull",
        "per_shard",
        "sequential",
    ),
    REDUCE_SCATTER: (
        None,
        "scatter",
        "scatter pieces=1",
        "scatter kernel=hopper block_m=128 block_n=192 split_n=3 stages=4 sms=24",
        "scatter kernel=hopper block_m=128 block_n=256 split_n=4 stages=3",
        "scatter kernel=hopper block_m=128 block_n=160 stages=5 sms=24",
        "scatter sums=epilogue kernel=hopper block_m=128 block_n=192 split_n=3 stages=4",
        "scatter sums=epilogue kernel=hopper block_m=128 block_n=256 split_n=4 stages=3 sms=24",
        "scatter split_k=4",
        "scatter split_k=3 sums=epilogue",
        "scatter split_k=2 mover=copy_kernel",
        "scatter kernel=portable",
        "scatter sums=epilogue pieces=1",
        "scatter sums=epilogue pieces=4 order=all_peers",
        "scatter sums=epilogue kernel=portable",
        "fused_ring",
        "fused_ring pieces=1 kernel=portable",
        "fused_ring pieces=4 kernel=hopper block_m=128 block_n=192 split_n=3 stages=4",
        "fused_ring kernel=hopper block_m=128 block_n=256 split_n=4 stages=3 sms=24",
        "fused_ring kernel=hopper block_m=128 block_n=160 stages=5 sms=24",
        "fused_ring kernel=hopper block_m=64 block_n=256 split_n=1 stages=4",
        "scatter_stored",
        "scatter_stored pieces=1 kernel=portable",
        "scatter_stored pieces=4 order=all_peers kernel=hopper block_m=128 block_n=192 split_n=3 stages=4",
        "scatter_stored kernel=hopper block_m=128 block_n=256 split_n=4 stages=3 sms=24",
        "scatter_stored kernel=hopper block_m=64 block_n=256 split_n=1 stages=4",
        "ring_stored",
        "ring_stored kernel=hopper block_m=128 block_n=160 stages=5",
        "ring_stored pieces=1 kernel=portable",
        "ring_stored pieces=4 kernel=hopper block_m=128 block_n=192 split_n=3 stages=4",
        "ring_stored kernel=hopper block_m=128 block_n=256 split_n=4 stages=3 sms=24",
        "ring_stored kernel=hopper block_m=64 block_n=256 split_n=1 stages=4",
        "scatter_pull",
        "scatter_pull pieces=1 own_pieces=1 kernel=portable",
        "scatter_pull pieces=4 own_pieces=2 kernel=hopper block_m=128 block_n=192 split_n=3 stages=4",
        "scatter_pull kernel=hopper block_m=128 block_n=256 split_n=4 stages=3 sms=24",
        "remote_add",
        "remote_add copy_programs=4 sms=1 kernel=hopper",  # beside the tiles, however few they are
        "remote_add pieces=4 order=all_peers kernel=portable",
        "scatter mover=copy_kernel",
        "scatter mover=copy_kernel copy_programs=4 sms=1",  # beside the tiles, however few they are
        "scatter mover=copy_kernel kernel=portable",
        "scatter_packed",
        "per_shard",
        "sequential",
    ),
    ALL_REDUCE: (
        None,
        "two_shot",
        "two_shot pieces=4",
        "two_shot sums=epilogue pieces=4",
        "two_shot kernel=portable",
        "one_shot_packed",
        "two_shot_packed",
        "ring_stored",
        "ring_stored pieces=1 kernel=portable",
        "ring_stored pieces=4 kernel=hopper block_m=128 block_n=192 split_n=3 stages=4",
        "ring_stored kernel=hopper block_m=128 block_n=256 split_n=4 stages=3 sms=24",
        "sequential",
    ),
}
LONG_RUNS = (
    (ALL_GATHER, "push"),
    (ALL_GATHER, "push mover=copy_kernel"),
    (ALL_GATHER, "push split_k=3"),
    (ALL_GATHER, "per_shard"),
    (ALL_GATHER, "gather_packed"),
    (REDUCE_SCATTER, "scatter"),
    (REDUCE_SCATTER, "scatter split_k=3"),
    (REDUCE_SCATTER, "scatter sums=epilogue"),
    (REDUCE_SCATTER, "fused_ring"),
    (REDUCE_SCATTER, "scatter_stored"),
    (REDUCE_SCATTER, "ring_stored"),
    (REDUCE_SCATTER, "scatter_pull"),
    (REDUCE_SCATTER, "remote_add sms=1"),
    (REDUCE_SCATTER, "scatter mover=copy_kernel sms=1"),
    (REDUCE_SCATTER, "scatter_packed"),
    (ALL_REDUCE, "two_shot"),
    (ALL_REDUCE, "one_shot_packed"),
    (ALL_REDUCE, "two_shot_packed"),
    (ALL_REDUCE, "ring_stored"),
)
NON_ZEROS = 32
ERROR_RATIO = 1.05
LARGEST = 2048


class Case(NamedTuple):
    """The matmul of one rank: `[m, k] @ [k, n]`, m before the scatter or after the gather."""

    operator: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    b_is_transposed: bool
    plan: str | None


class Inputs(NamedTuple):
    """A rank's tensors; gathered: all rows of x (all-gather only)."""

    x: torch.Tensor
    w: torch.Tensor
    gathered: torch.Tensor


def make_inputs(case: Case, seed: int, exact: bool) -> Inputs:
    """Random inputs of this rank. The gathered x is drawn from a seed that all ranks share."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shared, own = _generator(seed), _generator(seed * 64 + rank + 1)
    lo, hi = shard_rows(case.m, world_size, rank)
    is_gather = case.operator == ALL_GATHER
    budget = NON_ZEROS if is_gather else NON_ZEROS // world_size
    x = _matrix(case.m, case.k, case.dtype, shared if is_gather else own, budget if exact else None)
    rows, cols = (case.n, case.k) if case.b_is_transposed else (case.k, case.n)
    w = _matrix(rows, cols, case.dtype, own, case.k if exact else None)
    return Inputs(x[lo:hi].clone() if is_gather else x, w.t() if case.b_is_transposed else w, x)


def _generator(seed: int) -> torch.Generator:
    generator = torch.Generator(device="cuda")
    generator.manual_seed(seed)
    return generator


def _matrix(rows: int, cols: int, dtype: torch.dtype, chance: torch.Generator, non_zeros: int | None) -> torch.Tensor:
    """Normal numbers, or integers in {-1, 0, 1} with at most `non_zeros` per row other than zero."""
    if non_zeros is None:
        return torch.randn((rows, cols), device="cuda", generator=chance).to(dtype)
    signs = torch.randint(0, 2, (rows, cols), device="cuda", generator=chance) * 2 - 1
    if cols > non_zeros:
        keep = torch.rand((rows, cols), device="cuda", generator=chance).argsort(1) < non_zeros
        signs = signs * keep
    return signs.to(dtype)


def run(case: Case, inputs: Inputs, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The operator under test."""
    if case.operator == ALL_GATHER:
        return ow.all_gather_matmul(inputs.x, inputs.w, group, m=case.m, plan=case.plan)
    reduced = ow.matmul_all_reduce if case.operator == ALL_REDUCE else ow.matmul_reduce_scatter
    return reduced(inputs.x, inputs.w, group, plan=case.plan)


def expected(case: Case, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """The result in `dtype` arithmetic, without rounding between ranks."""
    if case.operator == ALL_GATHER:
        return inputs.gathered.to(dtype) @ inputs.w.to(dtype)
    partial = inputs.x.to(dtype) @ inputs.w.to(dtype)
    dist.all_reduce(partial)
    if case.operator == ALL_REDUCE:
        return partial
    lo, hi = shard_rows(case.m, dist.get_world_size(), dist.get_rank())
    return partial[lo:hi]


def is_bit_equal(case: Case, seed: int) -> bool:
    inputs = make_inputs(case, seed, exact=True)
    return bool(torch.equal(run(case, inputs), expected(case, inputs, torch.float32).to(case.dtype)))


def error_ratio(case: Case, seed: int) -> float:
    """Our error over that of torch + NCCL, both against fp64, in the 2-norm over all ranks."""
    inputs = make_inputs(case, seed, exact=False)
    truth = expected(case, inputs, torch.float64)
    if case.operator == ALL_GATHER:
        theirs = reference.all_gather_matmul(inputs.x, inputs.w, m=case.m)
    else:
        reduced = reference.matmul_all_reduce if case.operator == ALL_REDUCE else reference.matmul_reduce_scatter
        theirs = reduced(inputs.x, inputs.w)
    squares = torch.stack([((result.double() - truth) ** 2).sum() for result in (run(case, inputs), theirs)])
    dist.all_reduce(squares)
    return float((squares[0] / squares[1].clamp(min=1e-30)).sqrt())


def random_cases(count: int, seed: int, operators: tuple[str, ...] = OPERATORS, text: str = "") -> Iterator[Case]:
    """Any operator that has a plan with `text` in it, such a plan, layout and 16-bit dtype; every tenth m is tiny."""
    chance, world_size = random.Random(seed), dist.get_world_size()
    plans = {operator: [plan for plan in PLANS[operator] if text in (plan or "")] for operator in operators}
    offering = [operator for operator in operators if plans[operator]]
    for index in range(count):
        operator = offering[index % len(offering)]
        m = chance.randrange(world_size) if index % 10 == 0 else chance.randint(1, LARGEST)
        plan = chance.choice(plans[operator])
        step = 1 if plan in (None, "per_shard", "sequential") else 8
        n, k = (step * chance.randint(1, LARGEST // step) for _ in range(2))
        dtype = chance.choice((torch.bfloat16, torch.float16))
        yield Case(operator, m, n, k, dtype, chance.random() < 0.5, plan)


def shape_set(name: str, operators: tuple[str, ...] = OPERATORS) -> Iterator[Case]:
    """The cases of a benchmark set, each with the chosen plan, as one rank sees them."""
    world_size = dist.get_world_size()
    for operator in operators:
        for case in read_shapes(name, operator).cases:
            n = case.n // world_size if operator == ALL_GATHER else case.n
            k = case.k if operator == ALL_GATHER else case.k // world_size
            yield Case(operator, case.m, n, k, torch.bfloat16, False, None)


def long_run(case: Case, calls: int, is_replayed: bool) -> int:
    """How many of `calls` results differ: new inputs every time, one rank late, eager or as replays of a graph."""
    sets = [make_inputs(case, seed, exact=True) for seed in range(1, 9)]
    wanted = [expected(case, inputs, torch.float32).to(case.dtype) for inputs in sets]
    chance, rank = random.Random(7), dist.get_rank()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    static = Inputs(*(tensor.clone() for tensor in sets[0]))
    call: Callable[[], torch.Tensor] = _captured(case, static) if is_replayed else (lambda: run(case, static))
    for _ in range(calls):
        index, late = chance.randrange(len(sets)), chance.randrange(4 * dist.get_world_size())
        cycles = chance.randint(10_000, 500_000)
        static.x.copy_(sets[index].x)
        static.w.copy_(sets[index].w)
        if rank == late:
            torch.cuda._sleep(cycles)
        differing += (call() != wanted[index]).any()
    torch.cuda.synchronize()
    return int(differing)


def _captured(case: Case, static: Inputs) -> Callable[[], torch.Tensor]:
    run(case, static)  # binds the plan: nothing compiles or allocates slots under capture
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(case, static)

    def replay() -> torch.Tensor:
        out.fill_(float("nan"))
        graph.replay()
        return out

    return replay


def sizes(text: str) -> tuple[int, int, int]:
    """The three numbers of `M,N,K`. Raises ValueError."""
    m, n, k = (int(part) for part in text.split(","))
    return m, n, k


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--only", nargs="*", choices=OPERATORS, default=OPERATORS)
    parser.add_argument("--set", default="mlp", help="a shape set to check too; empty: none")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--plans", default="", help="only plans with this text in them, such as split_k")
    parser.add_argument(
        "--long-shape", type=sizes, default=(1000, 512, 512), help="M,N,K of the named plans' long runs"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    join(timedelta(seconds=20))
    started = time.monotonic()
    only = tuple(arguments.only)
    cases = [*random_cases(arguments.shapes, arguments.seed, only, arguments.plans)]
    cases += shape_set(arguments.set, only) if arguments.set else ()
    wrong = [case for index, case in enumerate(cases) if not report.all_agree(is_bit_equal(case, index))]
    report.line("bit-equal on integers", len(cases), [str(case) for case in wrong], started)
    judged = [case for case in cases if case.m * case.n >= 4096]
    ratios = [error_ratio(case, index) for index, case in enumerate(judged)]
    loud = [f"{r:.3f} {c}" for r, c in zip(ratios, judged, strict=True) if not r <= ERROR_RATIO]
    report.line(f"float error, worst ratio {max(ratios, default=0):.3f}", len(judged), loud, started)
    m, n, k = arguments.long_shape
    for is_replayed, calls in ((False, arguments.calls), (True, arguments.replays)):
        for operator, plan in (run for run in LONG_RUNS if run[0] in only and arguments.plans in run[1]):
            case = Case(operator, m, n, k, torch.bfloat16, True, plan)
            differing = report.total(long_run(case, calls, is_replayed)) if calls else 0
            what = "replays" if is_replayed else "successive calls"
            report.line(f"{what} of {operator}.{plan}", calls, [f"{differing} differ"] if differing else [], started)
    ow.check()
    report.finish()


if __name__ == "__main__":
    main()
