"""How much slower is what the model chooses, unmeasured, than the quickest that was measured?

    python -m campaigns.cold_choice [--shipped] [FILE ...]        (default: overweave/tuner/tables/*.json)

Files: tables that `overweave tune` wrote, and results of `overweave bench --json`, whose cases ran side by side. Of
each problem: the choice and its measured time, the winner and its time; the share is one over the other, and behind it
stands how the quickest of what users had before, the library's and torch's, compares. A choice that was measured in
another number of pieces or tile shape only counts as that; any other is not judged. --shipped: the choice is that of
the package's tables, where they know a problem or a neighbour.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct

from benchmarks.teach import entries
from overweave.errors import InputError
from overweave.ir.problem import Problem
from overweave.schedules.records.outside import OUTSIDE
from overweave.tuner.measure.baselines import SEQUENTIAL
from overweave.tuner.model.choose import choose
from overweave.tuner.model.rank import cold_choice, rank_candidates
from overweave.tuner.space.target import Target
from overweave.tuner.store.cache import Entry, Knowledge, Table, Time, decode, fingerprint, shipped

TABLES = Path(__file__).parents[2] / "overweave" / "tuner" / "tables"
LEAST_MEAN, NEVER_BELOW = 0.97, 0.98
METHODS = ("mover", "sums", "order", "matmul")  # options that are more than a size
GPU = Target("cuda")
Choose = Callable[[Problem], str]


class Share(Struct, frozen=True):
    """One problem. taken: the choice, as measured."""

    entry: Entry
    taken: Time

    @property
    def best(self) -> Time:
        return min(self.entry.times, key=lambda time: time.us)

    @property
    def share(self) -> float:
        """Of the winner's speed."""
        return self.best.us / self.taken.us

    @property
    def over_theirs(self) -> float:
        """The time of the quickest that needs nothing of ours, over that of the choice."""
        theirs = [time.us for time in self.entry.times if time.plan in (SEQUENTIAL, *OUTSIDE)]
        return min(theirs, default=self.taken.us) / self.taken.us

    def __str__(self) -> str:
        problem, best = self.entry.problem, self.best
        shape = f"{problem.operator:22s} m={problem.m:<6d} n={problem.n:<6d} k={problem.k:<6d} W={problem.world_size}"
        taken = f"{self.taken.candidate!s:40s} {self.taken.us:8.1f} us"
        return f"{self.share:5.3f} {self.over_theirs:6.3f}  {shape} {taken}; {best.candidate!s:40s} {best.us:8.1f} us"


def read(path: Path) -> tuple[Entry, ...]:
    """What was measured. Raises InputError for a file that is neither table nor results."""
    try:
        data = path.read_bytes()
        return decode(data).entries if b'"fingerprint"' in data[:1024] else tuple(entries(data))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        cure = "Give a file that `overweave tune` or `overweave bench --json` wrote"
        raise InputError(f"measurements {path}", str(error), cure) from error


def by_model(problem: Problem) -> str:
    """What a first call takes where nothing is known."""
    return str(cold_choice(rank_candidates(problem, GPU, is_thorough=False), problem).candidate)


def by_tables(problem: Problem) -> str:
    """What a first call takes on a machine that measured nothing itself."""
    size = problem.world_size
    return choose(problem, GPU, Knowledge(Table(fingerprint=fingerprint(GPU, size)), shipped(GPU.name, size))).text


def shares(known: Iterable[Entry], choose: Choose = by_model) -> list[Share]:
    """What can be judged: the problems on which the choice was measured."""
    found = ((entry, _measured(entry, choose(entry.problem))) for entry in known)
    return [Share(entry, taken) for entry, taken in found if taken is not None]


def _measured(entry: Entry, choice: str) -> Time | None:
    same = [time for time in entry.times if str(time.candidate) == choice]
    alike = [time for time in entry.times if _method(str(time.candidate)) == _method(choice)]
    return next(iter(same + alike), None)


def _method(choice: str) -> tuple[str, ...]:
    """Who moves, adds and multiplies, and in which order."""
    plan, *options = choice.split()
    return plan, *(option for option in options if option.split("=")[0] in METHODS)


def verdict(name: str, known: int, found: list[Share]) -> tuple[bool, str]:
    """Whether what was judged holds, and a line that says so."""
    if not found:
        return True, f"none  {name}: no choice for its {known} problems was measured"
    mean = sum(each.share for each in found) / len(found)
    behind = sum(each.over_theirs < NEVER_BELOW for each in found)
    said = f"mean {mean:.3f} of the quickest over {len(found)} of {known}; {behind} below {NEVER_BELOW} of theirs"
    return mean >= LEAST_MEAN, f"{'pass' if mean >= LEAST_MEAN else 'FAIL'}  {name}: {said}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--shipped", action="store_true")
    asked = parser.parse_args(arguments)
    judged: list[Share] = []
    problems, holds = 0, True
    for path in asked.files or sorted(TABLES.glob("*.json")):
        try:
            known = read(path)
        except InputError as error:
            print(error, file=sys.stderr)
            return 2
        found = shares(known, by_tables if asked.shipped else by_model)
        is_held, said = verdict(path.name, len(known), found)
        print(*sorted(map(str, found)), said, sep="\n")
        judged, problems, holds = judged + found, problems + len(known), holds and is_held
    print(verdict("all", problems, judged)[1])
    return int(not (holds and judged))


if __name__ == "__main__":
    sys.exit(main())
