"""Breaks small right schedules in many ways and compares verify with a run of every interleaving.

`python -m campaigns.verify_mutations --per-class 200`. Each mutant is run twice: with queues as free as they may be,
and with each rank doing one thing at a time, which is what verify judges deadlock by. A mutant that verify accepts and
a run finds wrong is a hole in the proof: there must be none. One that verify refuses and both runs find right is listed
with the reason: verify demands more than these runs can see. Then mutants of plans are run on a GPU of few SMs
(`plans/`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from operator import itemgetter
from random import Random
from time import perf_counter

from rich.console import Console

from campaigns.oracle.interleavings import Outcome, explore
from campaigns.oracle.mutations import MUTATIONS
from campaigns.oracle.plans import plan_mutations
from campaigns.oracle.random.schedules import TEMPLATES
from campaigns.oracle.tally import Tally, holes, right_refused, table
from campaigns.shown import shown
from overweave.ir.schedule import Schedule
from overweave.ir.verify.plan import verify_schedule

SMALL_RANKS = (2, 2, 3)
PLAIN_SHARE = 20


def small_schedule(rng: Random) -> Schedule:
    """A right schedule whose every interleaving can be run."""
    ranks = rng.choice(SMALL_RANKS)
    return rng.choice(TEMPLATES).make(rng, ranks, rng.randint(1, 2) if ranks == 2 else 1)


def mutants(name: str, count: int, seed: int) -> Iterator[tuple[str, Schedule]]:
    """So many mutants of a class, with a label that says how to draw each again."""
    drawn = 0
    while count:
        drawn += 1
        rng = Random(f"{name}.{seed}.{drawn}")
        schedule = small_schedule(rng)
        mutant = MUTATIONS[name](rng, schedule)
        if mutant is not None and mutant != schedule:
            count -= 1
            yield f"{schedule.name} {seed}.{drawn}", mutant


def is_disputed(schedule: Schedule, reduced: Outcome) -> bool:
    """Whether a run without reduction, as far as it gets, comes to another end."""
    plain = explore(schedule, reduced=False)
    return plain.kind not in ("unfinished", "right") if reduced.kind == "right" else plain.kind == "right"


def campaign(per_class: int, seed: int = 0, classes: Iterable[str] = tuple(MUTATIONS)) -> dict[str, Tally]:
    """Every `PLAIN_SHARE`-th mutant is run without reduction too, so that the judge is judged."""
    tallies = {name: Tally() for name in classes}
    drawn = ((name, at, *each) for name in tallies for at, each in enumerate(mutants(name, per_class, seed)))
    for name, at, label, mutant in shown(drawn, "mutants", per_class * len(tallies), itemgetter(0)):
        outcome = explore(mutant)
        if at % PLAIN_SHARE == 0 and is_disputed(mutant, outcome):
            tallies[name].disputed.append(label)
        if outcome.kind == "right":
            outcome = explore(mutant, serial=True)
        tallies[name].add(label, verify_schedule(mutant), outcome.kind, outcome.message)
    return tallies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-class", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    start = perf_counter()
    tallies = campaign(asked.per_class, asked.seed) | plan_mutations.campaign(asked.per_class, asked.seed)
    Console(width=160).print(table(tallies))
    for line in (*right_refused(tallies), *holes(tallies)):
        print(line)
    total = sum(tally.mutants for tally in tallies.values())
    unfinished = sum(tally.unfinished for tally in tallies.values())
    wrong = sum(len(tally.wrong_accepted) for tally in tallies.values())
    print(f"{total} mutants in {len(tallies)} classes, {unfinished} more too large to run; wrong accepted: {wrong}")
    print(f"{perf_counter() - start:.0f} s")
    raise SystemExit(bool(holes(tallies)))


if __name__ == "__main__":
    main()
