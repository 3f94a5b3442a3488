"""Breaks small right schedules in many ways and compares verify with a run of every interleaving.

`python -m campaigns.verify_mutations --per-class 200`. Each mutant is run twice: with queues as free as they may be,
and with each rank doing one thing at a time, which is what verify judges deadlock by. A mutant that verify accepts and
a run finds wrong is a hole in the proof: there must be none. One that verify refuses and both runs find right is listed
with the reason: verify demands more than these runs can see.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator
from random import Random
from time import perf_counter

from msgspec import Struct, field
from rich.console import Console
from rich.table import Table

from campaigns.oracle.interleavings import Outcome, explore
from campaigns.oracle.mutations import MUTATIONS
from campaigns.oracle.random.schedules import TEMPLATES
from overweave.ir.schedule import Schedule
from overweave.ir.verify.schedule import verify_schedule
from overweave.ir.verify.verdict import Verdict

SMALL_RANKS = (2, 2, 3)
PLAIN_SHARE = 20


class Tally(Struct):
    """Mutants of one class, by what verify and the runs said. rules: why verify refused the wrong ones."""

    wrong_refused: int = 0
    right_accepted: int = 0
    wrong_accepted: list[str] = field(default_factory=list)
    right_refused: list[str] = field(default_factory=list)
    unfinished: int = 0
    disputed: list[str] = field(default_factory=list)
    rules: Counter[str] = field(default_factory=Counter)

    @property
    def mutants(self) -> int:
        return self.wrong_refused + self.right_accepted + len(self.wrong_accepted) + len(self.right_refused)

    def add(self, label: str, verdict: Verdict, outcome: Outcome) -> None:
        if outcome.kind == "unfinished":
            self.unfinished += 1
        elif outcome.kind == "right" and verdict.ok:
            self.right_accepted += 1
        elif outcome.kind == "right":
            self.right_refused.append(f"{label}: {verdict.refusals[0]}")
        elif verdict.ok:
            self.wrong_accepted.append(f"{label}: {outcome.kind}: {outcome.message}")
        else:
            self.wrong_refused += 1
            self.rules[verdict.refusals[0].rule] += 1


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
    tallies: dict[str, Tally] = {}
    for name in classes:
        tally = tallies[name] = Tally()
        for at, (label, mutant) in enumerate(mutants(name, per_class, seed)):
            outcome = explore(mutant)
            if at % PLAIN_SHARE == 0 and is_disputed(mutant, outcome):
                tally.disputed.append(label)
            if outcome.kind == "right":
                outcome = explore(mutant, serial=True)
            tally.add(label, verify_schedule(mutant), outcome)
    return tallies


def _table(tallies: dict[str, Tally]) -> Table:
    verdicts = ("wrong, refused", "right, accepted", "right, refused", "WRONG, ACCEPTED")
    table = Table("mutation", "mutants", *verdicts, "refused by")
    for name, tally in tallies.items():
        rules = ", ".join(f"{rule} {count}" for rule, count in tally.rules.most_common(4))
        counts = (tally.wrong_refused, tally.right_accepted, len(tally.right_refused), len(tally.wrong_accepted))
        table.add_row(name, str(tally.mutants), *map(str, counts), rules)
    return table


def _right_refused(tallies: dict[str, Tally]) -> Iterator[str]:
    """How often verify demanded more than the runs can see, by class and rule, with an example."""
    for name, tally in tallies.items():
        by_rule: dict[str, list[str]] = {}
        for reason in tally.right_refused:
            by_rule.setdefault(reason.partition("[")[2].partition("]")[0], []).append(reason)
        for rule, reasons in by_rule.items():
            yield f"right refused, {name}: {len(reasons)} x {rule}, such as {reasons[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-class", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    start = perf_counter()
    tallies = campaign(asked.per_class, asked.seed)
    Console(width=160).print(_table(tallies))
    for line in _right_refused(tallies):
        print(line)
    holes = [f"WRONG ACCEPTED {name}: {hole}" for name, tally in tallies.items() for hole in tally.wrong_accepted]
    holes += [f"DISPUTED {name}: {label}" for name, tally in tallies.items() for label in tally.disputed]
    for hole in holes:
        print(hole)
    total = sum(tally.mutants for tally in tallies.values())
    unfinished = sum(tally.unfinished for tally in tallies.values())
    wrong = sum(len(tally.wrong_accepted) for tally in tallies.values())
    print(f"{total} mutants in {len(tallies)} classes, {unfinished} more too large to run; wrong accepted: {wrong}")
    print(f"{perf_counter() - start:.0f} s")
    raise SystemExit(bool(holes))


if __name__ == "__main__":
    main()
