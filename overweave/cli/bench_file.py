"""The file of `overweave bench --json`, which holds every finished case while the next ones are measured."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from overweave.cli.destination import write_file
from overweave.tuner.measure.baselines import OURS
from overweave.tuner.measure.bench import BenchRun
from overweave.tuner.measure.summary import Spread, middle, spread


class BenchReport(Struct, frozen=True, kw_only=True):
    """What the file holds. runs: every whole run. middle: the one to quote. spread: how its numbers moved.

    unfinished: empty, or how far a bench was that is still at work or was ended before its time. Then the last run may
    lack cases; it is the middle one, and part of the spread, only where it is the first.
    """

    command: str
    shapes_source: str
    unfinished: str = ""
    runs: tuple[BenchRun, ...]
    middle: int
    spread: dict[str, dict[str, Spread]]


class Shapes(Protocol):
    """What was asked for, and where it comes from."""

    @property
    def cases(self) -> Sized: ...

    @property
    def source(self) -> str: ...


def report_of(command: str, shapes: Shapes, repeats: int, runs: tuple[BenchRun, ...]) -> BenchReport:
    """The file as it stands behind some of `repeats` whole runs, the last of which may have its first cases only."""
    cases = len(shapes.cases)
    whole = tuple(each for each in runs if len(each.cases) == cases) or runs
    chosen, done = middle(whole, OURS), len(runs[-1].cases)
    is_finished = len(runs) == repeats and done == cases
    return BenchReport(
        command=command,
        shapes_source=shapes.source,
        unfinished="" if is_finished else f"{done} of {cases} cases of run {len(runs)} of {repeats}",
        runs=runs,
        middle=chosen,
        spread=spread(whole, chosen),
    )


def read_report(path: Path) -> BenchReport:
    """What a bench has written."""
    return msgspec.json.decode(path.read_bytes(), type=BenchReport)


def write_report(path: Path, report: BenchReport) -> None:
    """Whole or not at all. Raises InputError."""
    write_file(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
