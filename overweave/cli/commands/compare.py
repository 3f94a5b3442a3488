"""`overweave compare A B`: two timelines, each simulated now or read from a trace file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overweave.cli.commands.simulate import named_plan, plan_of_file
from overweave.cli.limits import existing_files, limited
from overweave.cli.output_file import HTML_HELP, page_writer
from overweave.cli.pictures.gantt import print_gantt, print_table, time_text
from overweave.cli.plans import options_of
from overweave.cli.programs import family_of, load_for, plan_of_program
from overweave.errors import InputError
from overweave.hardware.cards import machine_of_ranks
from overweave.hardware.machine import Machine, default_for
from overweave.ir.plan import Plan
from overweave.ir.text.files import printable
from overweave.ir.timeline.operations import with_contents
from overweave.ir.timeline.timeline import COMMUNICATION, COMPUTE, WAIT, Timeline
from overweave.ir.timeline.trace import MAX_BYTES, from_chrome, is_trace
from overweave.schedules.methods.registry import METHODS
from overweave.sim.cost import AuthorTile
from overweave.sim.simulate import simulate
from overweave.untrusted import read_bytes

WHAT = "A schedule with options, such as 'all_gather_matmul.push pieces=2'; or a file of a plan or a trace"


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=WHAT)],
    b: Annotated[str, typer.Argument(metavar="B", help="The same for the other one")],
    shape: Annotated[str | None, typer.Option(help="M,N,K of the global matmul, for schedules by name")] = None,
    world: Annotated[int, typer.Option("--world", "-w", min=1, help="How many ranks, for schedules by name")] = 4,
    machine: Annotated[
        str | None, typer.Option(help="A machine, or a file of one; else H200s, as many as need be")
    ] = None,
    html: Annotated[Path | None, typer.Option(help=HTML_HELP)] = None,
) -> None:
    """Set two timelines beside each other, and print which is faster and how much communication each leaves exposed."""
    files = existing_files(a, b, machine)
    load_for(*(each.split()[0] for each in (a, b) if each.split()))
    with limited(*files):
        write_page, where = page_writer(html), machine_of_ranks(machine or default_for(world), world)
        sides = {"A": _timelines(a, shape, world, where), "B": _timelines(b, shape, world, where)}
        first, second = sides["A"][0], sides["B"][0]
        console = Console()
        console.print(verdict(first, second), soft_wrap=True, markup=False, highlight=False)
        print_table(console, _table(sides))
        for timelines in sides.values():
            for timeline in timelines:
                print_gantt(console, timeline)
        write_page(f"{a} and {b}", *sides["A"], *sides["B"])


def verdict(a: Timeline, b: Timeline) -> str:
    """Return which of two calls is faster, and what communication each leaves exposed, as two sentences."""
    quick, slow = ("A", "B") if a.total_us <= b.total_us else ("B", "A")
    times = sorted((a.total_us, b.total_us))
    ratio = times[1] / times[0] if times[0] else 1.0
    took = f"A takes {time_text(a.total_us)} ({a.source}) and B takes {time_text(b.total_us)} ({b.source})"
    which = f"{quick} is {ratio:.2f} times as fast as {slow}" if ratio >= 1.005 else "both are equally fast"
    exposed = f"A leaves {a.exposed_us():.1f} us of communication exposed, B leaves {b.exposed_us():.1f} us"
    return f"{took}: {which}. {exposed}."


def _timelines(argument: str, shape: str | None, world: int, machine: Machine) -> tuple[Timeline, ...]:
    """Return those of a trace file, or the simulated one. Raises InputError and ScheduleError."""
    name, *options = argument.split() or [""]
    if family_of(name) is not None:
        return (_simulated(*plan_of_program(name, shape, options_of(options), (world, machine)), machine),)
    if name in METHODS:
        return (_simulated(named_plan(name, shape, (world, machine), options_of(options)), None, machine),)
    path = Path(argument)
    if path.is_file() and is_trace(data := read_bytes(path, MAX_BYTES)):
        timelines = from_chrome(data)
        if not timelines:
            raise InputError(
                f"compare {printable(argument)}", "a trace of no call", "Give one that `overweave trace` wrote"
            )
        return timelines
    return (_simulated(plan_of_file(argument, (), machine), None, machine),)


def _simulated(plan: Plan, kernel_us: AuthorTile | None, machine: Machine) -> Timeline:
    tiles = simulate(plan, machine, with_tiles=True, author_tile_us=kernel_us)
    return with_contents(tiles, plan.schedule, plan.realization.dtype)


def _table(sides: dict[str, tuple[Timeline, ...]]) -> Table:
    """Return a table with one line for each timeline: in each column the rank with the largest value."""
    table = Table(title="microseconds, of the slowest rank in each column", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("timeline", no_wrap=True)
    for column in ("whole call", "computes", "communicates", "waits", "exposed", "hidden"):
        table.add_column(column, justify="right")
    for side, timelines in sides.items():
        for each in timelines:
            ranks = range(each.world_size)
            busy = [max(each.busy_us(rank, kinds) for rank in ranks) for kinds in ((COMPUTE,), COMMUNICATION, (WAIT,))]
            numbers = (each.total_us, *busy, each.exposed_us())
            cells = tuple(f"{number:.1f}" for number in numbers)
            table.add_row(side, Text(f"{each.source}: {each.name}"), *cells, f"{each.hidden_share():.1%}")
    return table
