"""The output of trials: a table, charts in the terminal, a trace and a picture, each with the simulated timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from overweave.cli.output_file import write_file
from overweave.cli.pictures.gantt import is_on_one_scale, print_gantt, print_table, time_text
from overweave.errors import PACKAGES
from overweave.hardware.machine import load
from overweave.ir.problem import Problem
from overweave.ir.timeline.operations import with_contents
from overweave.ir.timeline.timeline import Timeline
from overweave.ir.timeline.trace import to_chrome
from overweave.ops.trial import TrialResult
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import method_of
from overweave.sim.simulate import simulate
from overweave.tuner.space.target import Target, tile_options

try:
    from overweave.cli.pictures.png import save_png

    draw: Callable[..., None] | None = save_png
except ImportError:  # matplotlib is an extra: without it there is no picture
    draw = None

_COLUMNS = ("operator", "plan", "MxNxK", "exact", "error", "time")


def simulate_schedule(name: str, problem: Problem, options: dict[str, str | int], machine: str) -> Timeline:
    """Return the simulated timeline of a schedule on a described machine of Hopper GPUs, tile by tile. Raises
    InputError."""
    method = method_of(name)
    best = tile_options(Target("cuda"), method) if method.is_fused else {}
    plan = build(name, problem, best | options)
    timeline = simulate(plan, load(machine), with_tiles=True)
    return with_contents(timeline, plan.schedule, plan.realization.dtype)


def print_trials(console: Console, title: str, trials: Sequence[TrialResult]) -> None:
    """Print one line per trial."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    torchs = ", ".join(f"{trial.library_error:.1e}" for trial in trials)
    table.caption = f"exact: integers, the reference's bits; error: against fp64 (torch and its collectives: {torchs})"
    table.caption_justify = "left"
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _COLUMNS[:2] else "right", no_wrap=True)
    for trial in trials:
        operator, method = trial.case.schedule.split(".")
        verdict = "[green]yes[/]" if trial.is_exact else "[bold red]NO[/]"
        error = f"{trial.error:.1e}" if trial.is_right else f"[bold red]{trial.error:.1e}[/]"
        time = time_text(trial.timeline.total_us)
        table.add_row(operator, method, global_shape(trial.case.problem), verdict, error, time)
    print_table(console, table)


def global_shape(problem: Problem) -> str:
    """Return the matmul before tensor parallelism, as `MxNxK`."""
    parts = problem.record.parts(problem.world_size)
    return "x".join(str(size * parts[name]) for name, size in problem.sizes.items())


def print_charts(console: Console, *timelines: Timeline) -> None:
    """Print each timeline on its own scale: an emulated rank is a thousand times slower than the simulated one."""
    for timeline in timelines:
        print_gantt(console, timeline)
        console.print()


def save_trace_and_picture(console: Console, folder: Path, name: str, *timelines: Timeline) -> None:
    """Write a trace and a picture into an existing folder. Raises InputError if it cannot."""
    trace, picture = folder / f"{name}.json", folder / f"{name}.png"
    write_file(trace, to_chrome(*timelines))
    console.print(f"{trace}: every tile and chunk, for ui.perfetto.dev", soft_wrap=True)
    if draw is None:
        console.print(f"no picture: matplotlib is missing: {PACKAGES['matplotlib']}")
    else:
        draw(picture, *timelines, one_scale=is_on_one_scale(timelines))
        console.print(f"{picture}: the same, drawn", soft_wrap=True)
