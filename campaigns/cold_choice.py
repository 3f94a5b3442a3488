"""How much slower is what the model chooses, unmeasured, than what tuning found? On tables that `overweave tune` wrote.

    python -m campaigns.cold_choice [TABLE ...]        (default: overweave/tuner/tables/*.json)

Of each problem: the model's choice and its measured time, the winner and its time; the share is one over the other. A
choice that differs from what was measured in its options only counts as the measured plan of the same name.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from msgspec import Struct

from overweave.errors import InputError
from overweave.tuner.cache import decode
from overweave.tuner.rank import cold_choice, weigh
from overweave.tuner.space import Candidate
from overweave.tuner.table import Entry, Table, Time
from overweave.tuner.target import Target

TABLES = Path(__file__).parents[1] / "overweave" / "tuner" / "tables"
LEAST_MEAN = 0.97


class Share(Struct, frozen=True):
    """One problem. taken: the model's choice, as measured."""

    entry: Entry
    taken: Time

    @property
    def share(self) -> float:
        """Of the winner's speed."""
        return min(time.us for time in self.entry.times) / self.taken.us


def read(path: Path) -> Table:
    """Raises InputError for a file that is no table."""
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise InputError(f"table {path}", str(error), "Give a file that `overweave tune --json` wrote") from error


def shares(table: Table, target: Target) -> list[Share]:
    """What can be judged: the problems on which the model's choice was measured."""
    found = []
    for entry in table.entries:
        cold = cold_choice(weigh(entry.problem, target, is_thorough=False), entry.problem.operator).candidate
        taken = _measured(entry, cold)
        if taken is not None:
            found.append(Share(entry, taken))
    return found


def _measured(entry: Entry, cold: Candidate) -> Time | None:
    same = [time for time in entry.times if time.candidate == cold]
    alike = [time for time in entry.times if time.plan == cold.plan]
    return next(iter(same + alike), None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path, metavar="TABLE")
    asked = parser.parse_args(arguments)
    holds = True
    for path in asked.tables or sorted(TABLES.glob("*.json")):
        try:
            table = read(path)
        except InputError as error:
            print(error, file=sys.stderr)
            return 2
        found = shares(table, Target("cuda", name=table.fingerprint.device))
        for each in sorted(found, key=lambda each: each.share):
            problem, best = each.entry.problem, each.entry.times[0]
            print(
                f"{each.share:5.3f}  {problem.operator:22s} m={problem.m:<6d} n={problem.n:<6d} k={problem.k:<6d} "
                f"{each.taken.candidate!s:40s} {each.taken.us:8.1f} us; {best.candidate!s:40s} {best.us:8.1f} us"
            )
        mean = sum(each.share for each in found) / len(found) if found else 0.0
        holds &= mean >= LEAST_MEAN
        verdict = "pass" if mean >= LEAST_MEAN else "FAIL"
        print(f"{verdict}  {path.name}: mean {mean:.3f} of the tuned speed over {len(found)} of {len(table.entries)}")
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
