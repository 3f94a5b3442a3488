"""`overweave show`: the list of schedules, and the text of one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from overweave.cli.limits import limited
from overweave.cli.output_file import HTML_HELP, page_writer, write_file
from overweave.cli.plans import PROBLEM_OPTIONS, options_of, problem_of
from overweave.cli.programs import FAMILIES, family_of, schedule_of_program
from overweave.errors import InputError
from overweave.ir.dtype import Dtype
from overweave.ir.plan import Plan
from overweave.ir.schedule import Schedule
from overweave.ir.text.files import printable, read_file, to_json
from overweave.ir.text.parse import to_text
from overweave.ir.timeline.operations import timeline_of_steps, with_contents
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS
from overweave.schedules.records.options import Option
from overweave.schedules.weave.transports import transports

WIDTH = 36  # of a name
SOME_DTYPE: Dtype = "bfloat16"  # for the bytes of a schedule, which has no dtype


def show(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME|FILE", help="A schedule, or a file of one; without it, all are listed."),
    ] = None,
    world: Annotated[int | None, typer.Option("--world", "-w", help="How many ranks; 4 unless a file says.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help=f"key=value, also {', '.join(PROBLEM_OPTIONS)}.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the plan there instead; - is stdout.")] = None,
    html: Annotated[Path | None, typer.Option(help=f"{HTML_HELP}: steps, no times")] = None,
) -> None:
    """List the schedules, or print one in the text form (or its plan as JSON)."""
    if name is None:
        if json or option or html:
            raise InputError("show", "options without a schedule", "Name one; `overweave show` lists them")
        typer.echo(listing())
        return
    write_page = page_writer(html)
    value = _read(Path(name), world, option) if _is_file(name) else built(name, 4 if world is None else world, option)
    schedule, dtype = (value, SOME_DTYPE) if isinstance(value, Schedule) else (value.schedule, value.realization.dtype)
    if html is not None:
        steps = with_contents(timeline_of_steps(schedule), schedule, dtype)
        write_page(f"{printable(name)} on {schedule.world_size} ranks", steps)
    if json is None:
        if html is None:
            typer.echo(to_text(schedule), nl=False)
        return
    data = to_json(value)
    if str(json) == "-":
        typer.echo(data.decode(), nl=False)
        return
    write_file(json, data)
    typer.echo(f"{printable(name)}: {len(schedule.operations)} operations on {schedule.world_size} ranks -> {json}")


def is_named(name: str) -> bool:
    """Whether a schedule of the catalog is meant, or a family's program."""
    return name in METHODS or family_of(name) is not None


def _is_file(name: str) -> bool:
    return not is_named(name) and Path(name).is_file()


def built(name: str, world: int, option: list[str] | None) -> Schedule | Plan:
    """Return the catalog's plan, without tile tables: `load` makes them again; of a family's program, the schedule.
    Raises InputError."""
    if family_of(name) is not None:
        return schedule_of_program(name, options_of(option or []), world)
    problem, options = problem_of(name, world, options_of(option or []))
    return replace(build(name, problem, options, rank=0), tile_orders=())


def _read(file: Path, world: int | None, option: list[str] | None) -> Schedule | Plan:
    """Return what a file holds, unverified: `overweave verify` proves it. Raises InputError and ScheduleError."""
    if world is not None or option:
        raise InputError(f"show {printable(file)}", "--world or -o for a file", "A file says all of that itself")
    with limited(file):
        return read_file(file)


def listing() -> str:
    """Return one line per schedule of operators and of annotated kernels: its name, summary and options."""
    lines = [_line(name, method.summary, method.options) for name, method in METHODS.items()]
    for family in FAMILIES:
        lines += [_line(name, family.plans[family.operator_and_plan(name)[1]], ()) for name in family.names()]
    woven = [_line(name, "", transport.options) for name, transport in transports().items()]
    return "\n".join(
        [*lines, "", "Of a tensor of an annotated kernel (docs/directives.md, `overweave compile`):", *woven]
    )


def _line(name: str, summary: str, options: tuple[Option, ...]) -> str:
    option_names = f"[{' '.join(option.name for option in options)}]" if options else ""
    return " ".join(filter(None, (f"{name:{WIDTH}} ", summary, option_names))).rstrip()
