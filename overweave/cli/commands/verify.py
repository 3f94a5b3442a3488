"""`overweave verify FILE`: the proof of a schedule file, as an exit code and reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overweave.cli.limits import EXIT_CODES, PROVEN, UNUSABLE, limited, outcome_of, verdict_json
from overweave.cli.plans import prove
from overweave.errors import ScheduleError
from overweave.ir.schedule import Schedule
from overweave.ir.text.files import printable, read_file

IS_PROVEN = "no deadlock, no race, the goal is met in order, slots may be reused"


def verify(
    file: Annotated[Path, typer.Argument(help="JSON or text, as `overweave show` writes them.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove that a schedule cannot hang or race and meets its goal: exit 0 proven, 1 refuted, 2 unusable input, 3 not
    decided because it is too large."""
    name, size = printable(file), ""
    refusals: tuple[object, ...]
    notes: tuple[str, ...] = ()
    try:
        with limited(file):
            value = read_file(file)
            verdict = prove(value)
    except ScheduleError as error:
        outcome, refusals = outcome_of(error)
        subject = str(error) if outcome == UNUSABLE else name
    else:
        schedule = value if isinstance(value, Schedule) else value.schedule
        name, outcome, refusals, notes = verdict.name, verdict.outcome, verdict.refusals, verdict.notes
        size = f", {len(schedule.operations)} operations on {schedule.world_size} ranks"
        subject = name
    if as_json:
        typer.echo(verdict_json(name, outcome, refusals, notes))
    elif outcome == PROVEN:
        typer.echo("\n".join([f"{outcome}: {subject}{size}: {IS_PROVEN}", *(f"  note: {note}" for note in notes)]))
    else:
        reasons = () if outcome == UNUSABLE else refusals
        typer.echo("\n".join([f"{outcome}: {subject}{size}", *(f"  {refusal}" for refusal in reasons)]))
    raise typer.Exit(EXIT_CODES[outcome])
