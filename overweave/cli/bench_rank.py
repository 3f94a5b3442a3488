"""One rank of `overweave bench`, which starts it as `python -m overweave.cli.bench_rank ORDER` under torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from overweave.cli.bench_file import Draft, Report, write_report
from overweave.errors import OverweaveError
from overweave.ops.operators import operator_for
from overweave.tuner.measure.bench import Request, joined_world, runs


class Order(Struct, frozen=True, kw_only=True):
    """What the ranks of a whole run do. file: where the first one writes after each case; empty: nowhere."""

    request: Request
    draft: Draft
    file: str = ""


def run_as_rank(order: Order) -> Report:
    """This process's part of one whole run; rank 0 draws the progress bar and writes the file, case by case."""
    request = order.request
    percentage = TextColumn("{task.percentage:>3.0f} %")
    columns = (TextColumn("{task.description}"), BarColumn(), percentage, TimeElapsedColumn())
    first = os.environ["RANK"] == "0"
    done = {case.name: index for index, case in enumerate(request.cases)}
    with (
        joined_world(request.device) as group,
        Progress(*columns, console=Console(stderr=True), transient=True, disable=not first) as progress,
    ):
        task = progress.add_task(request.operator, total=len(request.cases))

        def on_progress(case: str, part: float) -> None:
            progress.update(task, completed=done[case] + part, description=f"{request.operator} {case}")

        for so_far in runs(request, group, operator_for, on_progress):
            report = order.draft.report(so_far)
            if first and order.file:
                write_report(Path(order.file), report)
    return report


def main() -> None:
    try:
        run_as_rank(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order))
    except OverweaveError as error:
        sys.exit(f"overweave: {error}")


if __name__ == "__main__":
    main()
