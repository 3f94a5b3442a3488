"""Is what the static heuristic takes the best, or nearly, of what the simulator knows?

    python -m campaigns.heuristic_cases --machine mi300x8 --seed 7 [--seed 8 ...] [--count 64] [--verbose]

Synthetic matmuls, as many for each seed. The heuristic (overweave/tuner/model/heuristic.py) calls no simulator. It is
right where its plan is the best of the simulated ones or within 2 % of it; for the others the mean loss is told.
Beside it stands the paper's own rule (FiCCO, V-C), against the best of the four schedules that it chooses from: in the
paper it is right in 81 % of the cases and loses 14 % elsewhere. At last g1 to g16 of the paper's Table I.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from msgspec import Struct

from campaigns.choices.ficco_tables import FINER, OFFERED, Case, simulated_us, synthetic, table_i
from campaigns.verdict import Verdict, tell
from overweave.errors import InputError
from overweave.hardware.machine import Machine, load
from overweave.ir.problem import Problem
from overweave.tuner.model.heuristic import advise, paper_rule

SAME, RIGHT, MOST_LOST = 0.02, 0.90, 0.05


class Outcome(Struct, frozen=True):
    """A choice among simulated times."""

    case: Case
    taken: str
    best: str
    loss: float

    @property
    def is_right(self) -> bool:
        return self.loss <= SAME

    def __str__(self) -> str:
        sizes = f"{self.case.m} x {self.case.n} x {self.case.k}"
        return f"{self.case.name:8s} {sizes:28s} {self.taken:20s} loses {self.loss:6.1%} against {self.best}"


def outcomes(cases: Sequence[Case], machine: Machine) -> tuple[list[Outcome], list[Outcome]]:
    """Of the heuristic among all that are offered, and of the paper's rule among its four."""
    ours, theirs = [], []
    for case in cases:
        problem = case.problem(machine.gpus)
        times = {plan: simulated_us(problem, machine, plan) for plan in OFFERED}
        ours.append(_outcome(case, times, OFFERED, _ours(problem, machine)))
        theirs.append(_outcome(case, times, FINER, paper_rule(problem, machine)))
    return ours, theirs


def _ours(problem: Problem, machine: Machine) -> str:
    return advise(problem, machine).plan


def _outcome(case: Case, times: dict[str, float], among: Sequence[str], taken: str) -> Outcome:
    best = min(among, key=times.__getitem__)
    return Outcome(case, taken, best, times[taken] / times[best] - 1)


def summary(found: Sequence[Outcome]) -> tuple[float, float]:
    """The share that is right, and the mean loss of the others."""
    wrong = [each.loss for each in found if not each.is_right]
    return 1 - len(wrong) / len(found), sum(wrong) / len(wrong) if wrong else 0.0


def verdicts(found: Sequence[Outcome], theirs: Sequence[Outcome], name: str) -> list[Verdict]:
    """What the heuristic promises on some cases, and how the paper's rule does."""
    right, lost = summary(found)
    rule_right, rule_lost = summary(theirs)
    plans = ", ".join(f"{plan} {sum(each.best == plan for each in found)}" for plan in OFFERED)
    return [
        Verdict(f"{name}: best or within {SAME:.0%} on {RIGHT:.0%}", f"{right:.1%} of {len(found)}", right >= RIGHT),
        Verdict(f"{name}: mean loss where wrong at most {MOST_LOST:.0%}", f"{lost:.1%}", lost <= MOST_LOST),
        Verdict(f"{name}: the paper's rule among its four", f"right {rule_right:.1%}, loses {rule_lost:.1%}", None),
        Verdict(f"{name}: which was best", plans, None),
    ]


def judged(cases: Sequence[Case], machine: Machine, name: str, show: Callable[[Outcome], bool]) -> list[Verdict]:
    """The verdicts on some cases; prints those that `show` names."""
    ours, theirs = outcomes(cases, machine)
    for each in filter(show, ours):
        print(each)
    return verdicts(ours, theirs, name)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="mi300x8")
    parser.add_argument("--seed", type=int, action="append", help="may be given several times")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--verbose", action="store_true", help="print every case, not the wrong ones alone")
    asked = parser.parse_args(arguments)
    try:
        machine = load(asked.machine)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2

    def show(each: Outcome) -> bool:
        return asked.verbose or not each.is_right

    found = []
    for seed in asked.seed or [0]:
        found += judged(synthetic(seed, asked.count, machine.gpus), machine, f"seed {seed}", show)
    found += judged(table_i(), machine, "g1 to g16", lambda each: True)
    return tell(found)


if __name__ == "__main__":
    sys.exit(main())
