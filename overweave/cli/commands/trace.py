"""`overweave trace`: when each tile waited, ran and ended and when each chunk moved, beside what was simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from overweave.cli.destination import make_folder
from overweave.cli.limits import files_of, limited
from overweave.cli.outcome import print_charts, print_trials, save, simulated
from overweave.cli.page_file import HTML_HELP, page_writer
from overweave.cli.plans import options_of
from overweave.cli.ranks import DeviceChoice, how_many, is_one_of_the_ranks, tried, where
from overweave.cli.shape import case_of as case_of_shape
from overweave.cli.shape import tell_of_rounding
from overweave.errors import InputError
from overweave.hardware.machine import default_for, load
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.schedules.methods.registry import method_of
from overweave.schedules.records.outside import OUTSIDE
from overweave.tuner.model.choose import choose
from overweave.tuner.space.target import Target

FAILED = 1


def trace(
    operator: Annotated[str, typer.Argument(metavar="OP", help=" or ".join(OPERATORS))],
    shape: Annotated[str, typer.Option(help="M,N,K of the global matmul, before tensor parallelism")],
    world: Annotated[int, typer.Option("--world", "-w", min=0, max=32, help="0: every GPU, or 4 emulated ranks")] = 0,
    device: Annotated[DeviceChoice, typer.Option(help="auto: GPUs where there are two")] = "auto",
    plan: Annotated[str | None, typer.Option(help="A schedule of the operator; by default the one it takes")] = None,
    option: Annotated[list[str] | None, typer.Option("--option", "-o", help="key=value for the schedule")] = None,
    machine: Annotated[str | None, typer.Option(help="A machine, or a file of one, to simulate; else H200s")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the trace and the picture")] = Path(),
    html: Annotated[Path | None, typer.Option(help=HTML_HELP)] = None,
) -> None:
    """Record when each tile and chunk ran, and draw it beside what was simulated."""
    place = where(device)
    world_size = how_many(place, world)
    whole = case_of_shape(shape)
    problem = whole.problem(operator, world_size, "bf16")
    name, options = _schedule(problem, place, plan, options_of(option or []))
    described = machine or default_for(world_size)
    files = files_of(machine)
    with limited(*files):
        is_large_enough = world_size <= load(described).gpus
        predicted = [simulated(name, problem, options, described)] if machine or is_large_enough else []
    make_folder(out)
    write_page = page_writer(html)
    if not is_one_of_the_ranks():
        tell_of_rounding(problem.record, whole, world_size)
    words = ["trace", operator, f"--shape={shape}", f"--world={world_size}", "--device=cuda", f"--plan={name}"]
    words += [f"--out={out}", *(f"--option={word}" for word in option or [])]
    words += [*([f"--machine={machine}"] if machine else []), *([f"--html={html}"] if html else [])]
    trials = tried([(name, problem, options)], place, world_size, words)
    if not trials:
        return  # another rank tells
    console = Console()
    depth = "GPUs" if place == "cuda" else f"emulated ranks, depth {trials[0].case.depth}"
    print_trials(console, f"{world_size} {depth}", trials)
    print_charts(console, trials[0].timeline, *predicted)
    if not predicted:
        console.print(f"nothing simulated: {world_size} ranks are more than the GPUs of {described}")
    save(console, out, f"trace.{name}", trials[0].timeline, *predicted)
    write_page(f"{name} on {world_size} {depth}", trials[0].timeline, *predicted)
    if not trials[0].is_right:
        raise typer.Exit(FAILED)


def _schedule(
    problem: Problem, place: str, plan: str | None, options: dict[str, str]
) -> tuple[str, dict[str, str | int]]:
    """The schedule that was asked for, by its short or full name, or the one the operator takes."""
    if plan is None:
        taken = choose(problem, Target(place)).plan
        if taken in OUTSIDE:
            cure = "Name a schedule of ours with --plan"
            raise InputError(f"trace {problem.operator}", f"it takes {taken}, which has no schedule", cure)
        return taken, dict(options)
    name = plan if "." in plan else f"{problem.operator}.{plan}"
    method_of(name)
    return name, dict(options)
