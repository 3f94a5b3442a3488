"""`overweave bench experts --simulate`, and `attention`: predicted times by each plan, without any rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overweave.attention.cases import ATTENTION, read_attention
from overweave.attention.predicted import predicted as attention_predicted
from overweave.cli.bench_table import LEAST_WIDTH
from overweave.cli.output_file import check_file, write_file
from overweave.hardware.machine import Machine
from overweave.moe.cases import EXPERTS, read_experts
from overweave.moe.predicted import predicted, skew_costs
from overweave.schedules.records.experts import PLANS
from overweave.tuner.measure.predicted_plans import Predicted
from overweave.tuner.space.target import target_named

Predictions = Sequence[Predicted[Any]]


def predict_layers(shapes: str, tokens: Sequence[int], place: tuple[str, int], file: Path | None) -> None:
    """Print a line for each layer of experts. place: a machine and the number of ranks; 0: four. Raises InputError for
    a machine without GPUs for so many ranks."""

    def rows(machine: Machine, ranks: int) -> Predictions:
        return [predicted(case, ranks, machine) for case in read_experts(shapes or "moe").on_ranks(ranks, tokens)]

    found = _predict(EXPERTS, rows, place, file)
    for plan in PLANS:
        if costs := skew_costs(found, plan):
            most = max(costs.values())
            line = f"{plan}, tensor parallel: with a skewed router at most {most:.3f} of an even one's time"
            _console().print(line, markup=False, soft_wrap=True)


def predict_attention(shapes: str, tokens: Sequence[int], place: tuple[str, int], file: Path | None) -> None:
    """The same for each case of attention."""

    def rows(machine: Machine, ranks: int) -> Predictions:
        cases = read_attention(shapes or ATTENTION).on_ranks(ranks, tokens)
        return [attention_predicted(case, ranks, machine) for case in cases]

    _predict(ATTENTION, rows, place, file)


def _predict(
    subject: str, rows: Callable[[Machine, int], Predictions], place: tuple[str, int], file: Path | None
) -> Predictions:
    """Print and return the predictions of a subject's cases."""
    name, ranks = place[0], place[1] or 4
    target = target_named(name, ranks)
    machine = target.machine(ranks)
    assert machine is not None  # target_named refuses more ranks than it has GPUs
    if file is not None:
        check_file(file)
    found = rows(machine, ranks)
    if file is not None:
        write_file(file, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    console = _console()
    console.print(_table(found, f"{subject}: predicted for {ranks} ranks, bf16, the slowest rank's"))
    console.print(f"Machine: {target.found}", markup=False, soft_wrap=True)
    return found


def _console() -> Console:
    console = Console()
    console.width = max(console.width, LEAST_WIDTH)
    return console


def _table(found: Predictions, title: str) -> Table:
    """A column for each plan, with the part of the link's time that it hides; the first is the sequential one."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.caption, table.caption_justify = "ratio: the part of the link's time that is hidden", "left"
    sequential, *overlapped = dict.fromkeys(plan for each in found for plan in each.plans)
    columns = (
        "",
        "alone\nus",
        "link\nus",
        f"{sequential}\nus",
        *(f"{plan}\nus ratio" for plan in overlapped),
        "chosen",
    )
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for each in found:
        cells = [f"{us:.0f}" for us in (each.alone_us, each.link_us, each.plans[sequential])]
        for plan in overlapped:
            ratio = each.measures(plan).overlap_ratio if plan in each.plans else None
            hidden = "     " if ratio is None else f"{ratio:5.2f}"
            cells.append(f"{each.plans[plan]:.0f} {hidden}" if plan in each.plans else "")
        table.add_row(Text(each.case.name), *cells, each.choice)
    return table
