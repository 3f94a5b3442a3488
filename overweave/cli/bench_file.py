"""The file of `overweave bench --json`, which holds every finished case while the next ones are measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from overweave.cli.destination import write_file
from overweave.tuner.measure.baselines import OURS
from overweave.tuner.measure.bench import Run
from overweave.tuner.measure.summary import Spread, middle, spread


class Report(Struct, frozen=True, kw_only=True):
    """What the file holds. runs: every whole run. middle: the one to quote. spread: how its numbers moved.

    unfinished: empty, or how far a bench was that is still at work or was ended before its time. Then the last run may
    lack cases; it is the middle one, and part of the spread, only where it is the first.
    """

    command: str
    shapes_source: str
    unfinished: str = ""
    runs: tuple[Run, ...]
    middle: int
    spread: dict[str, dict[str, Spread]]


class Draft(Struct, frozen=True, kw_only=True):
    """What a file is to hold. cases: of each run. repeats: how many runs. earlier: those that are whole already."""

    command: str
    shapes_source: str
    cases: int
    repeats: int = 1
    earlier: tuple[Run, ...] = ()

    def report(self, run: Run) -> Report:
        """The file as it stands with one more run, or with the first cases of one."""
        runs = (*self.earlier, run)
        whole = tuple(each for each in runs if len(each.cases) == self.cases) or runs
        chosen = middle(whole, OURS)
        is_finished = len(runs) == self.repeats and len(run.cases) == self.cases
        so_far = f"{len(run.cases)} of {self.cases} cases of run {len(runs)} of {self.repeats}"
        return Report(
            command=self.command,
            shapes_source=self.shapes_source,
            unfinished="" if is_finished else so_far,
            runs=runs,
            middle=chosen,
            spread=spread(whole, chosen),
        )


def write_report(path: Path, report: Report) -> None:
    """Whole or not at all. Raises InputError."""
    write_file(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
