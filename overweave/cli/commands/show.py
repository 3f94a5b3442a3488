"""`overweave show`: the schedules there are, and what each of them says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from overweave.cli.destination import write_file
from overweave.cli.pictures.page_file import HTML_HELP, page_writer
from overweave.cli.plans import PROBLEM_OPTIONS, options_of, problem_of
from overweave.errors import InputError
from overweave.ir.text.files import to_json
from overweave.ir.text.printed import to_text
from overweave.ir.timeline.contents import with_contents
from overweave.ir.timeline.steps import timeline_of_steps
from overweave.schedules.catalog.catalog import build
from overweave.schedules.catalog.options import Option
from overweave.schedules.methods.registry import METHODS
from overweave.schedules.weave.transports import TRANSPORTS

WIDTH = 36  # of a name


def show(
    name: Annotated[str | None, typer.Argument(help="A schedule; without one, all are listed.")] = None,
    world: Annotated[int, typer.Option("--world", "-w", help="How many ranks.")] = 4,
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
    problem, options = problem_of(name, world, options_of(option or []))
    plan = build(name, problem, options, rank=0)
    if html is not None:
        steps = with_contents(timeline_of_steps(plan.schedule), plan.schedule, plan.realization.dtype)
        write_page(f"{name} on {world} ranks", steps)
        if json is None:
            return
    if json is None:
        typer.echo(to_text(plan.schedule), nl=False)
        return
    # Tile tables follow from the rest; whoever loads the file makes them anew.
    data = to_json(replace(plan, tile_orders=()))
    if str(json) == "-":
        typer.echo(data.decode(), nl=False)
        return
    write_file(json, data)
    typer.echo(f"{name}: {len(plan.schedule.operations)} operations on {world} ranks -> {json}")


def listing() -> str:
    """One line per schedule of operators and of annotated kernels: its name, what it does, the options it takes."""
    lines = [_line(name, method.summary, method.options) for name, method in METHODS.items()]
    woven = [_line(name, "", transport.options) for name, transport in TRANSPORTS.items()]
    return "\n".join(
        [*lines, "", "Of a tensor of an annotated kernel (docs/directives.md, `overweave compile`):", *woven]
    )


def _line(name: str, summary: str, options: tuple[Option, ...]) -> str:
    taken = f"[{' '.join(option.name for option in options)}]" if options else ""
    return " ".join(filter(None, (f"{name:{WIDTH}} ", summary, taken))).rstrip()
