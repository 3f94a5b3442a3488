"""`overweave trace`: when each tile waited, ran and ended and when each chunk moved, beside the simulated timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from overweave.cli.limits import existing_files, limited
from overweave.cli.output_file import HTML_HELP, make_folder, page_writer
from overweave.cli.plans import case_of as case_of_shape
from overweave.cli.plans import options_of, report_rounding
from overweave.cli.ranks import DeviceChoice, device_for, is_one_of_the_ranks, rank_count, run_trials
from overweave.cli.trial_output import print_charts, print_trials, save_trace_and_picture, simulate_schedule
from overweave.errors import InputError
from overweave.hardware.cards import MOST_OF_ONE_HOST
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
    """Record when each tile and chunk ran, and draw it beside the simulated timeline."""
    place = device_for(device)
    world_size = rank_count(place, world)
    whole = case_of_shape(shape)
    problem = whole.problem(operator, world_size, "bf16")
    name, options = _schedule(problem, place, plan, options_of(option or []))
    described = machine or default_for(min(world_size, MOST_OF_ONE_HOST))
    files = existing_files(machine)
    with limited(*files):
        is_large_enough = world_size <= load(described).gpus
        predicted = [simulate_schedule(name, problem, options, described)] if machine or is_large_enough else []
    make_folder(out)
    write_page = page_writer(html)
    if not is_one_of_the_ranks():
        report_rounding(problem.record, whole, world_size)
    arguments = ["trace", operator, f"--shape={shape}", f"--world={world_size}", "--device=cuda", f"--plan={name}"]
    arguments += [f"--out={out}", *(f"--option={key}={value}" for key, value in options.items())]
    arguments += [*([f"--machine={machine}"] if machine else []), *([f"--html={html}"] if html else [])]
    trials = run_trials([(name, problem, options)], place, world_size, arguments)
    if not trials:
        return  # another rank prints
    console = Console()
    depth = "GPUs" if place == "cuda" else f"emulated ranks, depth {trials[0].case.depth}"
    print_trials(console, f"{world_size} {depth}", trials)
    print_charts(console, trials[0].timeline, *predicted)
    if not predicted:
        console.print(f"nothing simulated: {world_size} ranks are more than the GPUs of {described}")
    save_trace_and_picture(console, out, f"trace.{name}", trials[0].timeline, *predicted)
    write_page(f"{name} on {world_size} {depth}", trials[0].timeline, *predicted)
    if not trials[0].is_right:
        raise typer.Exit(FAILED)


def _schedule(
    problem: Problem, place: str, plan: str | None, options: dict[str, str]
) -> tuple[str, dict[str, str | int]]:
    """Return the schedule of `--plan` with the user's options; without it, the operator's choice with the options of
    that choice, of which the user's take precedence."""
    if plan is None:
        choice = choose(problem, Target(place))
        if choice.plan in OUTSIDE:
            cure = "Name a schedule of ours with --plan"
            raise InputError(f"trace {problem.operator}", f"it takes {choice.plan}, which has no schedule", cure)
        return choice.plan, choice.options | options
    name = plan if "." in plan else f"{problem.operator}.{plan}"
    method_of(name)
    return name, dict(options)
