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
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.cases import LONG_RUNS, OPERATORS, every_plan
from campaigns.exact.calls import Case, captured, error_ratio, expected, make_inputs, results, run
from campaigns.gpu_ranks import join, report
from overweave.tuner.space.shapes import read_shapes

ERROR_RATIO = 1.05
LARGEST = 2048


def is_bit_equal(case: Case, seed: int) -> bool:
    inputs = make_inputs(case, seed, exact=True)
    return bool(torch.equal(run(case, inputs), expected(case, inputs, torch.float32).to(case.dtype)))


def random_cases(count: int, seed: int, operators: tuple[str, ...] = OPERATORS, text: str = "") -> Iterator[Case]:
    """Any operator that has a plan with `text` in it, such a plan, layout and 16-bit dtype; every tenth m is tiny."""
    chance, world_size = random.Random(seed), dist.get_world_size()
    plans = {
        operator: [plan for plan in (None, *every_plan(operator)) if text in (plan or "")] for operator in operators
    }
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
            own = case.problem(operator, world_size, "bf16")
            yield Case(operator, own.m, own.n, own.k)


def long_run(case: Case, calls: int, is_replayed: bool) -> int:
    """How many of `calls` results differ: new inputs every time, one rank late, eager or as replays of a graph."""
    sets = [make_inputs(case, seed, exact=True) for seed in range(1, 9)]
    wanted = [expected(case, inputs, torch.float32).to(case.dtype) for inputs in sets]
    chance, rank = random.Random(7), dist.get_rank()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    static = sets[0]._replace(x=sets[0].x.clone(), w=sets[0].w.clone())
    eager = partial(results, case, static)
    call = captured(eager) if is_replayed else eager
    for _ in range(calls):
        index, late = chance.randrange(len(sets)), chance.randrange(4 * dist.get_world_size())
        cycles = chance.randint(10_000, 500_000)
        static.x.copy_(sets[index].x)
        static.w.copy_(sets[index].w)
        if rank == late:
            torch.cuda._sleep(cycles)
        differing += (call()[0] != wanted[index]).any()
    torch.cuda.synchronize()
    return int(differing)


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
        for operator, plan in (one for one in LONG_RUNS if one.operator in only and arguments.plans in one.plan):
            case = Case(operator, m, n, k, torch.bfloat16, True, plan)
            differing = report.total(long_run(case, calls, is_replayed)) if calls else 0
            what = "replays" if is_replayed else "successive calls"
            report.line(f"{what} of {operator}.{plan}", calls, [f"{differing} differ"] if differing else [], started)
    ow.check()
    report.finish()


if __name__ == "__main__":
    main()
