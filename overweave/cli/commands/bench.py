"""`overweave bench`: an operator beside the library, torch's fused op and the roofs, on every rank of one host.

Without torchrun's variables in the environment it starts its own ranks through torchrun, once per whole run; with
them it is one of the ranks.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec.structs import replace

from overweave.cli.bench_file import Draft, Report, write_report
from overweave.cli.bench_rank import Order, run_as_rank
from overweave.cli.bench_table import print_runs
from overweave.cli.destination import check_file
from overweave.cli.ranks import Device, how_many, is_one_of_the_ranks, torchrun, warn_of_hours, where
from overweave.errors import InputError, MachineError
from overweave.ir.operators.registry import OPERATORS, operator_of
from overweave.ops.call.plan_words import candidate_of
from overweave.tuner.measure.bench import Request
from overweave.tuner.space.shapes import DtypeWord, read_shapes


def bench(
    operator: Annotated[str, typer.Argument(metavar="OP", help=" or ".join(OPERATORS))],
    shapes: Annotated[str, typer.Option(help="A file, or a set of benchmarks/shapes such as mlp")] = "mlp",
    world: Annotated[int, typer.Option("--world", "-w", min=0, max=32, help="0: every GPU, or 4 emulated ranks")] = 0,
    device: Annotated[Device, typer.Option(help="auto: GPUs where there is one")] = "auto",
    dtype: Annotated[DtypeWord, typer.Option(help="fp8: e4m3, scaled by rows, into bf16")] = "bf16",
    plan: Annotated[list[str] | None, typer.Option(help="Time these plans in place of our choice")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Whole runs; the middle one is shown, with the spread")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write every number to this file, case by case")] = None,
) -> None:
    """Compare an operator with the library, torch's fused op and the roofs, side by side in one run."""
    operator_of(operator, "bench")
    shape_set = read_shapes(shapes, operator)
    place = where(device, least=1)
    ranks = how_many(place, world)
    for case in shape_set.cases:
        case.problem(operator, ranks, dtype)  # what cannot be is refused before any rank is started
    for words in plan or ():
        candidate_of(operator, words)
    warn_of_hours(place, shape_set.cases)
    if json is not None:
        check_file(json)
    draft = Draft(
        command=f"overweave {' '.join(without_destination(sys.argv[1:]))}",
        shapes_source=shape_set.source,
        cases=len(shape_set.cases),
        repeats=repeat,
    )
    request = Request(operator=operator, cases=shape_set.cases, device=place, dtype=dtype, plans=tuple(plan or ()))
    order = Order(request=request, draft=draft, file=str(json or ""))
    if not is_one_of_the_ranks():
        report = run_on_own_ranks(order, ranks)
    elif repeat > 1:
        raise InputError(f"bench --repeat {repeat}", "torchrun started this process", "Start it without torchrun")
    else:
        report = run_as_rank(order)
        if os.environ["RANK"] != "0":
            return
    print_runs(report.runs, report.middle, report.spread)


def without_destination(words: list[str]) -> list[str]:
    """A command line without `--json FILE`: what to repeat, not where this machine kept the numbers."""
    kept = [word for word, before in zip(words, ["", *words], strict=False) if "--json" not in (word, before)]
    return [word for word in kept if not word.startswith("--json=")]


def run_on_own_ranks(order: Order, world_size: int) -> Report:
    """Whole runs in fresh processes: nothing is warm from the last one. Raises MachineError if a rank fails."""
    asked = Path(order.file) if order.file else None
    is_kept = asked is not None and (asked.is_file() or not asked.exists())  # and no pipe, which takes it but once
    with tempfile.TemporaryDirectory(prefix="overweave-") as folder:
        file = asked if asked is not None and is_kept else Path(folder, "report.json")
        draft = order.draft
        for _ in range(draft.repeats):
            report = _whole_run(replace(order, draft=draft, file=str(file)), Path(folder, "order.json"), world_size)
            draft = replace(draft, earlier=report.runs)
    if asked is not None and not is_kept:
        write_report(asked, report)
    return report


def _whole_run(order: Order, path: Path, world_size: int) -> Report:
    """One run more in the file. However it ends before its time, it is said what the file holds."""
    path.write_bytes(msgspec.json.encode(order))
    file = Path(order.file)
    before = _written_ns(file)
    try:
        ended = torchrun(["overweave.cli.bench_rank", str(path)], world_size, is_quiet=True)
    finally:
        report = msgspec.json.decode(file.read_bytes(), type=Report) if _written_ns(file) != before else None
        if report is not None and len(report.runs[-1].cases) < order.draft.cases:
            typer.echo(f"overweave: {file} is unfinished: {report.unfinished}", err=True)
    if ended or report is None:
        raise MachineError("bench", f"a rank ended with {ended}", "Read what it printed above")
    return report


def _written_ns(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0
