"""What `overweave bench --simulate` prints of blocks and of layers of experts, and writes for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overweave.cli.bench_table import LEAST_WIDTH
from overweave.cli.output_file import check_file, write_file
from overweave.tuner.space.target import Target, target_named

USUAL_RANKS = 4


class PredictedOn(NamedTuple):
    """Where calls are predicted: a machine, and how many of its GPUs."""

    target: Target
    ranks: int


class Predictions(NamedTuple):
    """A line for each of `found`, its name first, and lines below. title: of the table. columns: their heads."""

    found: Sequence[Struct]
    title: str
    columns: tuple[str, ...]
    cells: Sequence[tuple[str, ...]]
    lines: Iterable[str] = ()


def place_of(asked: tuple[str, int], file: Path | None) -> PredictedOn:
    """Return where to predict. asked: a machine and the number of ranks; 0: four. file: to be written. Raises
    InputError for a machine without GPUs for so many ranks, and for a file that cannot be written."""
    name, ranks = asked[0], asked[1] or USUAL_RANKS
    target = target_named(name, ranks)
    if file is not None:
        check_file(file)
    return PredictedOn(target, ranks)


def print_predictions(place: PredictedOn, predictions: Predictions, file: Path | None) -> None:
    """Print them, and write them to a file."""
    if file is not None:
        write_file(file, msgspec.json.format(msgspec.json.encode(tuple(predictions.found)), indent=1) + b"\n")
    table = Table(title=predictions.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(predictions.columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for name, *cells in predictions.cells:
        table.add_row(Text(name), *cells)
    console = Console()
    console.width = max(console.width, LEAST_WIDTH)
    console.print(table)
    for line in (f"Machine: {place.target.found}", *predictions.lines):
        console.print(line, markup=False, soft_wrap=True)
