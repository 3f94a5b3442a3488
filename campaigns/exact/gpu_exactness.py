"""Are results right on GPUs? Every operator through its public face, every result compared on the device.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_exactness --shapes 200 --calls 1000 --replays 1000 \\
        [--plans ring_stored --set ""] [--apart --plans waves --set ""]

Integer data in {-1, 0, 1} with at most 32 non-zeros along the global k: every partial and total is exact, so results
are bit-equal. Float data: at most 1.05 times the error of torch + NCCL against fp64. Outputs start as NaN, inputs
change at every call, a random rank is late. --apart: as if the GPUs did not reach each other's memory, where plans that
address peers are refused.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from campaigns.cases import BY_COLLECTIVES, BY_ENGINES, OPERATORS, every_plan
from campaigns.exact.calls import Case, error_ratio
from campaigns.exact.trials import long_run, of_case
from campaigns.gpu_ranks import Check, arguments, run_campaign, sharers
from overweave.memory.cuda import heap
from overweave.tuner.space.shapes import read_shapes

ERROR_RATIO = 1.05
LARGEST, JUDGED_FROM = 2048, 4096  # of a dimension; elements of a result whose error is judged


def unequal(case: Case, seed: int) -> str:
    """The case, if it has other bits than the exact result."""
    trial = of_case(case)
    given = trial.inputs(seed)
    return str(case) if trial.differs(trial.run(given), trial.exact(seed, given)) else ""


def loud(case: Case, seed: int) -> str:
    """The case, if its error is too large."""
    ratio = error_ratio(case, seed)
    return "" if ratio <= ERROR_RATIO else f"{ratio:.3f} {case}"


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
    for operator in operators:
        for case in read_shapes(name, operator).cases:
            own = case.problem(operator, dist.get_world_size(), "bf16")
            yield Case(operator, own.m, own.n, own.k)


def part_gpus() -> None:
    """From here on no GPU reaches another, be it one that ranks share."""
    heap.can_access_peers = lambda own, others: False


def checks(asked: argparse.Namespace) -> Iterator[Check]:
    """Random shapes and a set of shapes, in bits and in error; and the plans of `campaigns/cases.py`, long."""
    if asked.apart:
        part_gpus()
    operators = tuple(asked.operators)
    cases = [*random_cases(asked.shapes, asked.seed, operators, asked.plans)]
    cases += shape_set(asked.set, operators) if asked.set else ()
    yield Check("bit-equal on integers", lambda: [unequal(case, seed) for seed, case in enumerate(cases)])
    judged = [case for case in cases if case.m * case.n >= JUDGED_FROM]
    yield Check("float error beside the library", lambda: [loud(case, seed) for seed, case in enumerate(judged)])
    m, n, k = asked.long_shape
    every = (*BY_ENGINES, *BY_COLLECTIVES)
    replayed = [one for one in BY_ENGINES if not one.method.has_library_beside]  # what gloo does no graph holds
    runs = (
        ("successive calls", asked.calls, False, every),
        ("replays", asked.replays, True, replayed if sharers() > 1 else every),
    )
    for what, calls, is_replayed, plans in runs:
        for operator, plan in (one for one in plans if one.operator in operators and asked.plans in one.plan):
            trial = of_case(Case(operator, m, n, k, torch.bfloat16, True, plan))
            if calls:
                yield Check(f"{what} of {operator}.{plan}", partial(long_run, trial, calls, is_replayed), calls)


def sizes(text: str) -> tuple[int, int, int]:
    """The three numbers of `M,N,K`. Raises ValueError."""
    m, n, k = (int(part) for part in text.split(","))
    return m, n, k


def main() -> None:
    parser = arguments(__doc__ or "", deadline_s=20)
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--operators", nargs="*", choices=OPERATORS, default=OPERATORS)
    parser.add_argument("--set", default="mlp", help="a shape set to check too; empty: none")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--plans", default="", help="only plans with this text in them, such as ring_stored")
    parser.add_argument("--apart", action="store_true", help="as if no GPU reached another; name --plans that can run")
    long_shape = "M,N,K of the named plans' long runs"
    parser.add_argument("--long-shape", type=sizes, default=(1000, 512, 512), help=long_shape)
    parser.add_argument("--seed", type=int, default=0)
    run_campaign(parser, checks)


if __name__ == "__main__":
    main()
