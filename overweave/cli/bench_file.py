"""The file of `overweave bench --json`, which is rewritten after every case."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from overweave.cli.output_file import write_file
from overweave.tuner.measure.baselines import OURS
from overweave.tuner.measure.bench import BenchRun
from overweave.tuner.measure.summary import Spread, middle, spread


class BenchReport(Struct, frozen=True, kw_only=True):
    """The content of the file. runs: every whole run. middle: the one to quote. spread: of its numbers over runs.

    unfinished: "" or the progress of a bench that still runs or was stopped. Then the last run may lack cases; it
    counts for the middle and the spread only if it is the first.
    """

    command: str
    shapes_source: str
    unfinished: str = ""
    runs: tuple[BenchRun, ...]
    middle: int
    spread: dict[str, dict[str, Spread]]


class Shapes(Protocol):
    """The cases of a bench, and their source."""

    @property
    def cases(self) -> Sized: ...

    @property
    def source(self) -> str: ...


def report_of(command: str, shapes: Shapes, repeats: int, runs: tuple[BenchRun, ...]) -> BenchReport:
    """Return the file after some of `repeats` whole runs, the last of which may lack cases."""
    cases = len(shapes.cases)
    whole = tuple(each for each in runs if len(each.cases) == cases) or runs
    middle_run, done = middle(whole, OURS), len(runs[-1].cases)
    is_finished = len(runs) == repeats and done == cases
    return BenchReport(
        command=command,
        shapes_source=shapes.source,
        unfinished="" if is_finished else f"{done} of {cases} cases of run {len(runs)} of {repeats}",
        runs=runs,
        middle=middle_run,
        spread=spread(whole, middle_run),
    )


def read_report(path: Path) -> BenchReport:
    """Return the content of a bench's file."""
    return msgspec.json.decode(path.read_bytes(), type=BenchReport)


def write_report(path: Path, report: BenchReport) -> None:
    """Write the file atomically. Raises InputError."""
    write_file(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
