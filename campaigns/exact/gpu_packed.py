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
from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from campaigns.cases import ALL_GATHER, ALL_REDUCE, PLAIN
from campaigns.exact.calls import Case
from campaigns.exact.gpu_exactness import unequal
from campaigns.exact.trials import LATE_S, absent_rank, long_run, of_case
from campaigns.gpu_ranks import Check, arguments, run_campaign
from overweave.schedules.tiles.shape import Multiplier

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


def exact(plans: tuple[tuple[str, str], ...], shapes: int) -> Iterator[str]:
    """Cases that are not bit-equal on this rank."""
    for index, pair in enumerate(mixed_cases(plans, shapes, seed=11)):
        for turn, case in enumerate((*pair, pair[0])):
            yield unequal(case, 3 * index + turn)


def interleaved(operator: str, plan: str, turns: int) -> list[str]:
    """What is wrong with replays of one graph of three calls, with eager calls of other sizes in between."""
    graphed = ((operator, 64, 2048, plan), (ALL_REDUCE, 33, 512, "two_shot"), (operator, 1, 1024, plan))
    shapes = (*graphed, (operator, 7, 4096, plan))
    trials = [of_case(Case(name, m, n, 256, torch.bfloat16, True, which)) for name, m, n, which in shapes]
    inputs = [trial.inputs(seed) for seed, trial in enumerate(trials)]
    wanted = [trial.exact(seed, given) for seed, (trial, given) in enumerate(zip(trials, inputs, strict=True))]
    for trial, given in zip(trials, inputs, strict=True):
        trial.run(given)
    torch.cuda.synchronize()
    dist.barrier()
    graph, chance = torch.cuda.CUDAGraph(), random.Random(5)
    with torch.cuda.graph(graph):
        results = [trial.run(given) for trial, given in zip(trials[:3], inputs, strict=False)]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(turns):
        # Drawn on every rank, also where nobody is late: all must make the same calls.
        late, cycles = chance.randrange(3 * dist.get_world_size()), chance.randint(10_000, 300_000)
        if late == dist.get_rank():
            torch.cuda._sleep(cycles)
        for _ in range(chance.randrange(3)):
            differing += trials[3].differs(trials[3].run(inputs[3]), wanted[3])
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        for trial, result, right in zip(trials[:3], results, wanted, strict=False):
            differing += trial.differs(result, right)
    torch.cuda.synchronize()
    return [f"{int(differing)} differ"] if differing else []


def checks(asked: argparse.Namespace) -> Iterator[Check]:
    plans = packed_plans(asked.matmul)
    yield Check("exact, between other plans", partial(exact, plans, asked.shapes))
    for operator, plan in plans:
        trial = of_case(Case(operator, 61, 1032, 512, torch.bfloat16, True, plan))
        if asked.calls:
            yield Check(f"{plan}: calls with a late rank", partial(long_run, trial, asked.calls, False), asked.calls)
        if asked.replays:
            replays = partial(interleaved, operator, plan, asked.replays)
            yield Check(f"{plan}: replays between eager calls", replays, asked.replays)
    for operator, plan in () if asked.no_faults else plans:
        trial = of_case(Case(operator, 100, 512, 512, torch.bfloat16, True, plan))
        yield Check(f"{plan}: absent rank", partial(absent_rank, trial, asked.deadline + LATE_S), 1)


def main() -> None:
    parser = arguments(__doc__ or "", deadline_s=6)
    parser.add_argument("--shapes", type=int, default=60)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--replays", type=int, default=300)
    parser.add_argument("--matmul", nargs="*", choices=MULTIPLIERS, default=MULTIPLIERS, help="who multiplies")
    parser.add_argument("--no-faults", action="store_true")
    run_campaign(parser, checks)


if __name__ == "__main__":
    main()
