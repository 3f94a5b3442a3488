"""Packed messages on GPUs: are all bits right, whatever runs between them, and all calls told when a rank is absent?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_packed [--matmul library early]

exact: shapes from one row on, odd ones and primes, each packed plan between calls of plans with slots and credits.
late: thousands of calls with a rank that comes late. replays: graphs between eager calls of other sizes. absent: a call
that one rank leaves out raises within the deadline and names it; after a reset all is well. With a norm:
campaigns/exact/gpu_epilogues.py. How quick small calls are, as captured graphs beside the library and torch's:
`overweave bench matmul_all_reduce --shapes llm_layers --plan one_shot_packed --plan "one_shot_packed matmul=early"`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.cases import ALL_GATHER, ALL_REDUCE, PLAIN
from campaigns.exact.calls import Case, expected, make_inputs, run
from campaigns.exact.gpu_exactness import is_bit_equal, long_run
from campaigns.exact.gpu_faults import LATE_S, absent_rank
from campaigns.gpu_ranks import join, report
from overweave.schedules.tiles.skinny import Multiplier

PACKED = tuple(plain for plain in PLAIN if plain.method.has_messages)
MULTIPLIERS: tuple[Multiplier, ...] = ("library", "skinny", "early")
BETWEEN = (
    (ALL_REDUCE, "two_shot"),
    (ALL_GATHER, "push"),
    (ALL_REDUCE, "sequential"),
)
PRIMES = (1, 1, 2, 3, 5, 7, 13, 31, 61, 127, 257, 509)


def packed_plans(multipliers: Iterable[Multiplier]) -> tuple[tuple[str, str], ...]:
    """Operator and plan, by whom multiplies."""
    options = ["" if one == "library" else f" matmul={one}" for one in multipliers]
    return tuple((operator, plan + option) for option in options for operator, plan in PACKED)


def mixed_cases(plans: tuple[tuple[str, str], ...], count: int, seed: int) -> Iterator[tuple[Case, Case]]:
    """A packed case and one that runs behind it."""
    chance = random.Random(seed)
    for index in range(count):
        m = chance.choice(PRIMES) if index % 3 else chance.randint(1, 600)
        # Kernels differ by whether 16 divides a number: few are compiled for others.
        step = 16 if index % 5 else 8
        n, k = step * chance.randint(1, 150), step * chance.randint(1, 64)
        dtype, is_transposed = chance.choice((torch.bfloat16, torch.float16)), chance.random() < 0.5
        (operator, plan), (own, packed) = BETWEEN[index % len(BETWEEN)], plans[index % len(plans)]
        yield (
            Case(own, m, n, k, dtype, is_transposed, packed),
            Case(operator, chance.randint(1, 600), 8 * chance.randint(1, 64), k, dtype, is_transposed, plan),
        )


def exact(plans: tuple[tuple[str, str], ...], shapes: int) -> list[str]:
    """Cases that were not bit-equal on some rank."""
    wrong = []
    for index, pair in enumerate(mixed_cases(plans, shapes, seed=11)):
        for turn, case in enumerate((*pair, pair[0])):
            if not report.all_agree(is_bit_equal(case, 3 * index + turn)):
                wrong.append(f"{index}.{turn}: {case}")
    return wrong


def interleaved(operator: str, plan: str, turns: int) -> int:
    """How many results differ of replays of one graph of three calls, with eager calls of other sizes in between."""
    cases = (
        Case(operator, 64, 2048, 256, torch.bfloat16, True, plan),
        Case(ALL_REDUCE, 33, 512, 256, torch.bfloat16, True, "two_shot"),
        Case(operator, 1, 1024, 256, torch.bfloat16, True, plan),
    )
    eager = Case(operator, 7, 4096, 256, torch.bfloat16, True, plan)
    inputs = [make_inputs(case, index, exact=True) for index, case in enumerate((*cases, eager))]
    wanted = [
        expected(case, given, torch.float32).to(case.dtype) for case, given in zip((*cases, eager), inputs, strict=True)
    ]
    for case, given in zip((*cases, eager), inputs, strict=True):
        run(case, given)
    torch.cuda.synchronize()
    dist.barrier()
    graph, chance = torch.cuda.CUDAGraph(), random.Random(5)
    with torch.cuda.graph(graph):
        results = [run(case, given) for case, given in zip(cases, inputs[:3], strict=True)]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(turns):
        # Drawn on every rank, also where nobody is late: all must make the same calls.
        late, cycles = chance.randrange(3 * dist.get_world_size()), chance.randint(10_000, 300_000)
        if late == dist.get_rank():
            torch.cuda._sleep(cycles)
        for _ in range(chance.randrange(3)):
            differing += (run(eager, inputs[3]) != wanted[3]).any()
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        for result, right in zip(results, wanted[:3], strict=True):
            differing += (result != right).any()
    torch.cuda.synchronize()
    return int(differing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=60)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--replays", type=int, default=300)
    parser.add_argument("--deadline", type=float, default=6.0)
    parser.add_argument("--matmul", nargs="*", choices=MULTIPLIERS, default=MULTIPLIERS, help="who multiplies")
    parser.add_argument("--no-faults", action="store_true")
    arguments = parser.parse_args()
    join(timedelta(seconds=arguments.deadline))
    started = time.monotonic()
    plans = packed_plans(arguments.matmul)
    if arguments.shapes:
        report.line("exact, between other plans", 3 * arguments.shapes, exact(plans, arguments.shapes), started)
    for operator, plan in plans:
        case = Case(operator, 61, 1032, 512, torch.bfloat16, True, plan)
        differing = report.total(long_run(case, arguments.calls, False)) if arguments.calls else 0
        told = [f"{differing} differ"] if differing else []
        report.line(f"{plan}: calls with a late rank", arguments.calls, told, started)
        differing = report.total(interleaved(operator, plan, arguments.replays)) if arguments.replays else 0
        told = [f"{differing} differ"] if differing else []
        report.line(f"{plan}: replays between eager calls", arguments.replays, told, started)
    ow.check()
    for operator, plan in () if arguments.no_faults else plans:
        case = Case(operator, 100, 512, 512, torch.bfloat16, True, plan)
        report.line(f"{plan}: absent rank", 1, absent_rank(case, arguments.deadline + LATE_S), started)
    report.finish()


if __name__ == "__main__":
    main()
