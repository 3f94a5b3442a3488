"""`overweave bench experts --simulate`: predicted times of layers of experts, by each plan, without any rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overweave.cli.bench_table import LEAST_WIDTH
from overweave.cli.output_file import check_file, write_file
from overweave.moe.cases import EXPERTS, read_experts
from overweave.moe.predicted import PredictedLayer, predicted, skew_costs
from overweave.schedules.records.experts import PLANS, SEQUENTIAL
from overweave.tuner.space.target import target_named


def predict_layers(shapes: str, tokens: Sequence[int], place: tuple[str, int], file: Path | None) -> None:
    """Print a line for each case. place: a machine and the number of ranks; 0: four. Raises InputError for a machine
    without GPUs for so many ranks."""
    name, ranks = place[0], place[1] or 4
    target = target_named(name, ranks)
    machine = target.machine(ranks)
    assert machine is not None  # target_named refuses more ranks than it has GPUs
    if file is not None:
        check_file(file)
    layers = tuple(predicted(case, ranks, machine) for case in read_experts(shapes or "moe").on_ranks(ranks, tokens))
    if file is not None:
        write_file(file, msgspec.json.format(msgspec.json.encode(layers), indent=1) + b"\n")
    console = Console()
    console.width = max(console.width, LEAST_WIDTH)
    console.print(_table(layers, f"{EXPERTS}: predicted for {ranks} ranks, bf16, the slowest rank's"))
    console.print(f"Machine: {target.found}", markup=False, soft_wrap=True)
    for plan in PLANS:
        if costs := skew_costs(layers, plan):
            line = (
                f"{plan}, tensor parallel: with a skewed router at most {max(costs.values()):.3f} of an even one's time"
            )
            console.print(line, markup=False, soft_wrap=True)


def _table(layers: tuple[PredictedLayer, ...], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    overlapped = [plan for plan in PLANS if plan != SEQUENTIAL]
    head = ("", "matmuls\nus", "link\nus", f"{SEQUENTIAL}\nus")
    of_plans = [column for plan in overlapped for column in (f"{plan}\nus", "overlap\nefficiency")]
    for column in (*head, *of_plans, "chosen"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for each in layers:
        cells = [f"{us:.1f}" for us in (each.alone_us, each.link_us, each.plans[SEQUENTIAL])]
        for plan in overlapped:
            efficiency = each.efficiency(plan) if plan in each.plans else None
            us = f"{each.plans[plan]:.1f}" if plan in each.plans else ""
            cells += [us, "" if efficiency is None else f"{efficiency:.2f}"]
        table.add_row(Text(each.case.name), *cells, each.choice)
    return table
