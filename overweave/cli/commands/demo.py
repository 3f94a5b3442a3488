"""`overweave demo`: operators with the real kernels on the ranks at hand, checked and drawn beside the prediction.

On one GPU the ranks share it. Without GPUs the ranks are processes of this machine and the kernels are interpreted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from overweave.cli.output_file import HTML_HELP, make_folder, page_writer
from overweave.cli.ranks import DeviceChoice, RequestedPlan, device_for, rank_count, run_trials
from overweave.cli.trial_output import print_charts, print_trials, save_trace_and_picture, simulate_schedule
from overweave.hardware.machine import default_for
from overweave.ir.operators.record import Demo, Operator
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.tuner.measure.bench import device_count

FORECAST_RANKS, MOST_DESCRIBED = 4, 8  # of the described H200s
FAILED = 1
EMULATED = Demo("", m=128, n=128, k=64)  # small enough for the interpreter; m is per rank


def demo(
    ranks: Annotated[int, typer.Option(min=0, max=32, help="0: every GPU, or 4 that share one or are emulated")] = 0,
    device: Annotated[DeviceChoice, typer.Option(help="auto: GPUs where there is one")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png")] = Path(),
    html: Annotated[Path | None, typer.Option(help=HTML_HELP)] = None,
) -> None:
    """Run two operators with the real kernels, check them, and draw what happened; exit 1 if a result is wrong."""
    make_folder(out)
    write_page = page_writer(html)
    place = device_for(device, least=1)
    world_size = rank_count(place, ranks, may_share=True)
    records = {f"{record.name}.{record.demo.schedule}": record for record in OPERATORS.values() if record.demo}
    cases: list[RequestedPlan] = [
        (name, problem_for(record, place, world_size), {}) for name, record in records.items()
    ]
    arguments = ["demo", f"--ranks={world_size}", "--device=cuda", f"--out={out}"]
    trials = run_trials(cases, place, world_size, [*arguments, *([f"--html={html}"] if html else [])])
    if not trials:
        return  # another rank prints
    console = Console()
    title, times = describe_ranks(place, world_size)
    print_trials(console, f"{world_size} {title}", trials)
    console.print(times)
    forecast = forecast_ranks(place, world_size)
    machine = default_for(forecast)
    predicted = [
        simulate_schedule(name, problem_for(record, "cuda", forecast), {}, machine) for name, record in records.items()
    ]
    timelines = [timeline for pair in zip((t.timeline for t in trials), predicted, strict=True) for timeline in pair]
    print_charts(console, *timelines)
    save_trace_and_picture(console, out, "demo", *timelines)
    write_page(f"{world_size} {title}", *timelines)
    if not all(trial.is_right for trial in trials):
        raise typer.Exit(FAILED)


def forecast_ranks(place: str, world_size: int) -> int:
    """Return the number of GPUs of the prediction: as many as ran, if each rank has a GPU of its own; else four."""
    has_own_gpus = place == "cuda" and 2 <= world_size <= min(device_count(), MOST_DESCRIBED)
    return world_size if has_own_gpus else FORECAST_RANKS


def describe_ranks(place: str, world_size: int) -> tuple[str, str]:
    """Return what the ranks are, and what their times mean."""
    if place == "cpu":
        return (
            "emulated ranks, kernels interpreted",
            "Times are those of interpreted kernels on the processors of this machine: they say nothing of a GPU.",
        )
    if world_size <= (gpus := device_count()):
        return "GPUs", "Times are those of the GPUs, with a clock that all ranks share."
    return (
        f"ranks that share {'one GPU' if gpus == 1 else f'{gpus} GPUs'}",
        "Kernels, copies and signals are real. Ranks take a GPU by turns: times say nothing of overlap.",
    )


def problem_for(record: Operator, place: str, world_size: int) -> Problem:
    """Return the problem of one of the operators here."""
    sizes, times = (record.demo or EMULATED, 1) if place == "cuda" else (EMULATED, world_size)
    m, n, k = sizes.m * times, sizes.n, sizes.k
    return Problem(operator=record.name, world_size=world_size, dtype="bfloat16", m=m, n=n, k=k)
