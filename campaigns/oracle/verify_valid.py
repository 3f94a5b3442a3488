"""Proves many right schedules and says how long it took: `python -m campaigns.verify_valid --count 10000`.

Drawn beforehand: 2 to 8 ranks, about half of them with 200 operations or more, one in twenty with more than 2,000. Some
come from the catalog, the others from `random_schedules`. Only the proofs are timed.
"""

from __future__ import annotations

import argparse
import gc
from multiprocessing import get_context
from random import Random
from statistics import median
from time import perf_counter, process_time

from msgspec import Struct

from campaigns.oracle.random.schedules import random_schedule
from campaigns.shown import ignore_interrupts, shown
from overweave.errors import InputError
from overweave.ir.operators.registry import operator_of
from overweave.ir.problem import Problem
from overweave.ir.schedule import Schedule
from overweave.ir.verify.plan import verify_schedule
from overweave.schedules.catalog.catalog import build, names

BATCH = 100
LARGE = 2000


class Batch(Struct, frozen=True):
    """What became of some schedules. refused: name, seed and reason of each that was not proven."""

    operations: list[int]
    seconds: float
    refused: list[str]


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = Random(seed)
    kind = rng.random()
    if kind < 0.06:
        return random_schedule(rng, rng.randint(2, 8), rng.randint(2050, 2300))
    if kind < 0.57:
        return random_schedule(rng, rng.randint(2, 8), rng.randint(200, 280))
    if kind < 0.70:
        return from_catalog(rng)
    return random_schedule(rng, rng.randint(2, 8), rng.randint(10, 180))


def from_catalog(rng: Random) -> Schedule:
    """A schedule of the catalog, for a random problem."""
    name = rng.choice(names())
    operator = name.split(".")[0]
    gathers = operator == "all_gather_matmul" and rng.random() < 0.3
    m, world_size = rng.randint(0, 2048), rng.randint(2, 8)
    problem = Problem(
        operator=operator,
        m=operator_of(operator).whole_rows(m, world_size),
        n=rng.randint(1, 8) * 64,
        k=rng.randint(1, 8) * 64,
        world_size=world_size,
        dtype="bfloat16",
        returns_gathered=gathers,
    )
    options: dict[str, str | int] = {"pieces": rng.randint(1, 6), "order": rng.choice(("ring", "all_peers"))}
    while True:
        try:
            return build(name, problem, options, rank=0).schedule
        except InputError:
            options.popitem()


def prove(seeds: range) -> Batch:
    """Draws, then proves. What was drawn is kept from the garbage collector, which would go through all of it again."""
    schedules = [draw(seed) for seed in seeds]
    gc.freeze()
    start = process_time()
    verdicts = [verify_schedule(schedule) for schedule in schedules]
    seconds = process_time() - start
    gc.unfreeze()
    refused = [
        f"{verdict.name} (seed {seed}): {verdict.refusals[0]}"
        for seed, verdict in zip(seeds, verdicts, strict=True)
        if not verdict.ok
    ]
    return Batch([len(schedule.operations) for schedule in schedules], seconds, refused)


def _size(batch: Batch) -> str:
    return f"with {len(batch.operations)} schedules"


def campaign(count: int, processes: int, seed: int = 0) -> Batch:
    """seconds: of the processor, in the busiest process, as if every one had its own core."""
    batches = [range(at, min(at + BATCH, seed + count)) for at in range(seed, seed + count, BATCH)]
    if processes == 1:
        done = list(shown(map(prove, batches), "batches of schedules", len(batches), _size))
    else:
        with get_context("spawn").Pool(processes, ignore_interrupts) as pool:
            done = list(shown(pool.imap(prove, batches), "batches of schedules", len(batches), _size))
    operations = [size for batch in done for size in batch.operations]
    refused = [reason for batch in done for reason in batch.refused]
    return Batch(operations, sum(batch.seconds for batch in done) / processes, refused)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    start = perf_counter()
    result = campaign(asked.count, asked.processes, asked.seed)
    sizes = result.operations
    large = sum(size > LARGE for size in sizes) / len(sizes)
    print(f"proven {len(sizes) - len(result.refused)} of {len(sizes)} schedules, {sum(sizes)} operations")
    print(f"operations: median {median(sizes):.0f}, {large:.1%} above {LARGE}, most {max(sizes)}")
    print(f"proofs: {result.seconds:.1f} s with {asked.processes} processes; all: {perf_counter() - start:.1f} s")
    for reason in result.refused[:20]:
        print(f"REFUSED {reason}")
    raise SystemExit(bool(result.refused))


if __name__ == "__main__":
    main()
