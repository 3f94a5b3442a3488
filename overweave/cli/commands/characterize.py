"""`overweave characterize`: losses by cutting matmuls and transfers, and by running them together."""

from __future__ import annotations

import csv
from io import StringIO
from math import inf
from pathlib import Path
from time import process_time
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overweave.cli.limits import allowed_s, existing_files, limited
from overweave.cli.output_file import make_folder, write_file
from overweave.cli.pictures.gantt import print_table
from overweave.cli.progress import progress
from overweave.errors import PACKAGES, InputError
from overweave.hardware.machine import Machine, load
from overweave.ir.problem import Problem
from overweave.tuner.measure.overlap_losses import free_bytes, gpu_here, loss_names, measured_losses, shrink_to_memory
from overweave.tuner.model.overlap_losses import (
    BESIDE,
    MATMULS,
    OF_COPIES,
    TRANSFER,
    Losses,
    correlation,
    geomean,
    losses_of,
    predicted_losses,
)
from overweave.tuner.space.shapes import read_shapes

try:
    from overweave.cli.pictures.png import save_losses
except ImportError:  # matplotlib is an extra
    HAS_PICTURES = False
else:
    HAS_PICTURES = True

OPERATOR, RANKS = "all_gather_matmul", 8
CASE_S, _LEAST_S = 0.5, 0.01  # processor time for one case of untrusted files
Kinds = Literal["dil", "comm", "cil"]
ON_PAPER: dict[Kinds, tuple[str, ...]] = {"dil": MATMULS, "comm": (TRANSFER,), "cil": BESIDE}


def characterize(
    simulate: Annotated[str | None, typer.Option(help="Predict on this machine, or a file of one")] = None,
    only: Annotated[Kinds | None, typer.Option(help="dil: cut matmuls; comm: cut transfers; cil: together")] = None,
    shapes: Annotated[str, typer.Option(help="A file, or a set of benchmarks/shapes such as ficco")] = "ficco",
    world: Annotated[int, typer.Option("--world", "-w", min=2, max=64, help="Into how many a cut is made")] = RANKS,
    out: Annotated[
        Path | None, typer.Option(help="Folder for a CSV file and pictures (FiCCO, Figures 7 to 10)")
    ] = None,
) -> None:
    """Print what cutting and overlapping lose, on this GPU or on a described machine."""
    began = process_time()
    kinds: tuple[Kinds, ...] = (only,) if only else ("dil", "comm", "cil")
    cases = {case.name: case.problem(OPERATOR, world, "bf16") for case in read_shapes(shapes, OPERATOR).cases}
    if out is not None:
        make_folder(out)
    if simulate:
        with limited(*existing_files(simulate)):
            machine = load(simulate)
        losses, where = (
            _predicted(cases, machine, (simulate, shapes), kinds, process_time() - began),
            f"predicted on {machine.title}",
        )
    else:
        losses, where = _measured(cases, kinds), f"measured on {gpu_here()}"
    console = Console()
    print_table(console, _table(losses, where))
    _print_trends(console, losses)
    if out is not None:
        write_file(out / "losses.csv", _csv(losses))
        if HAS_PICTURES:
            write_file(out / "losses.png", save_losses(losses, where))
        pictures = "and losses.png" if HAS_PICTURES else f"; pictures need matplotlib: {PACKAGES['matplotlib']}"
        console.print(f"{out}: losses.csv {pictures}", soft_wrap=True)


def _predicted(
    cases: dict[str, Problem], machine: Machine, names: tuple[str, str], kinds: tuple[Kinds, ...], read_s: float
) -> list[Losses]:
    """Return the losses of each case on a described machine, within the limits of its file and of the shapes.

    read_s: the time of reading them, which counts.
    """
    name, shapes = names
    empty = next((case for case, problem in cases.items() if not problem.m), None)
    if empty is not None:
        raise InputError(f"characterize --shapes {shapes}", f"{empty} has no rows", "Give each case an m of 1 or more")
    ranks = max(problem.world_size for problem in cases.values())
    if ranks > machine.gpus:
        reason = f"{ranks} ranks on {machine.gpus} GPUs"
        raise InputError(f"characterize --simulate {name}", reason, "Give --world, or a machine with more GPUs")
    loss_names = tuple(each for kind in kinds for each in ON_PAPER[kind])
    if not machine.peer_access and {*loss_names} <= {*OF_COPIES}:
        reason = "its GPUs do not reach each other's memory: no copies go between them"
        raise InputError(
            f"characterize --only comm --simulate {name}", reason, "Leave --only out, or name another machine"
        )
    files, losses = existing_files(name, shapes), list[Losses]()
    own_shapes = existing_files(shapes)
    left_s = allowed_s(*own_shapes) - read_s if own_shapes else inf  # a set of the repository takes what it takes
    for case, problem in cases.items():
        began = process_time()
        with limited(*files, seconds=min(CASE_S, max(left_s, _LEAST_S))):
            losses.append(predicted_losses(case, problem, machine, loss_names))
        left_s -= process_time() - began
    return losses


def _measured(cases: dict[str, Problem], kinds: tuple[Kinds, ...]) -> list[Losses]:
    """Return the losses on one GPU: of cut matmuls, and of matmuls beside copies that need no peer."""
    gpu_here()
    names = loss_names(kinds)
    if not names:
        raise InputError(
            "characterize --only comm", "links between GPUs", "Add --simulate MACHINE; one GPU has no link"
        )
    losses = []
    with progress("characterize", len(cases), is_shown=True) as report:
        for done, (case, whole) in enumerate(cases.items()):
            report(case, done)
            problem, scaled = shrink_to_memory(whole, free_bytes())
            losses.append(losses_of(case, problem, measured_losses(problem, names), scaled))
    return losses


def _columns(cases: list[Losses]) -> tuple[str, ...]:
    return tuple(cases[0].factors) if cases else ()


def _table(cases: list[Losses], where: str) -> Table:
    table = Table(title=Text(f"time over the whole's, or over itself alone; {where}"), title_justify="left")
    for column in ("case", "m", "n", "k", "scale", "op/byte", "GB", *_columns(cases)):
        table.add_column(column, justify="right")
    for each in cases:
        sizes = Text(each.case), str(each.m), str(each.n), str(each.k), f"1/{each.scaled}" if each.scaled > 1 else "1"
        static = f"{each.op_to_byte:.0f}", f"{each.traffic_bytes / 1e9:.2f}"
        table.add_row(*sizes, *static, *(f"{each.factors[name]:.3f}" for name in _columns(cases)))
    return table


def _print_trends(console: Console, cases: list[Losses]) -> None:
    """Print the means, the correlations with static sizes, and the cases where FiCCO's rule (rows or columns) is
    wrong."""
    for name in _columns(cases):
        by_intensity, by_traffic = (correlation(cases, name, of) for of in ("op_to_byte", "traffic_bytes"))
        console.print(
            f"{name:28s} geometric mean {geomean(cases, name):6.3f}, correlation with op-to-byte {by_intensity:+.2f}, "
            f"with memory traffic {by_traffic:+.2f}",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
    if set(MATMULS) <= set(_columns(cases)):
        rows, columns = MATMULS[2:]
        other = [one.case for one in cases if (one.factors[rows] > one.factors[columns]) != (one.m < one.k)]
        exceptions = ", ".join(other) or "nowhere"
        console.print(
            f"rows are not the worse cut where m < k, or columns where m >= k: {exceptions}",
            soft_wrap=True,
            markup=False,
        )


def _csv(cases: list[Losses]) -> bytes:
    text = StringIO()
    writer = csv.writer(text)
    writer.writerow(["case", "m", "n", "k", "scaled", "op_to_byte", "traffic_bytes", *_columns(cases)])
    for one in cases:
        static = [one.case, one.m, one.n, one.k, one.scaled, f"{one.op_to_byte:.1f}", f"{one.traffic_bytes:.0f}"]
        writer.writerow([*static, *(f"{value:.4f}" for value in one.factors.values())])
    return text.getvalue().encode()
