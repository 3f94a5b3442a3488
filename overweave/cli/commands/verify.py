"""`overweave verify NAME|FILE`: the proof of a schedule, as an exit code and reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overweave.cli.commands.show import built, is_named
from overweave.cli.limits import EXIT_CODES, PROVEN, UNUSABLE, limited, outcome_of, verdict_json
from overweave.cli.plans import prove
from overweave.errors import InputError, ScheduleError
from overweave.ir.plan import Plan
from overweave.ir.schedule import Schedule
from overweave.ir.text.files import printable, read_file
from overweave.ir.verify.rules.verdict import Verdict

IS_PROVEN = "no deadlock, no race, the goal is met in order, slots may be reused"


def verify(
    subject: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="A schedule, or JSON or text, as `overweave show` writes them.")
    ],
    world: Annotated[
        int | None, typer.Option("--world", "-w", min=1, help="How many ranks; 4 unless a file says")
    ] = None,
    option: Annotated[list[str] | None, typer.Option("--option", "-o", help="key=value, as of `show`")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove that a schedule cannot hang or race and meets its goal: exit 0 proven, 1 refuted, 2 unusable input, 3 not
    decided because it is too large."""
    name, size = printable(subject), ""
    refusals: tuple[object, ...]
    notes: tuple[str, ...] = ()
    try:
        value, verdict = _proven(subject, world, option)
    except ScheduleError as error:
        outcome, refusals = outcome_of(error)
        told = str(error) if outcome == UNUSABLE else name
    else:
        schedule = value if isinstance(value, Schedule) else value.schedule
        name, outcome, refusals, notes = verdict.name, verdict.outcome, verdict.refusals, verdict.notes
        size = f", {len(schedule.operations)} operations on {schedule.world_size} ranks"
        told = name
    if as_json:
        typer.echo(verdict_json(name, outcome, refusals, notes))
    elif outcome == PROVEN:
        typer.echo("\n".join([f"{outcome}: {told}{size}: {IS_PROVEN}", *(f"  note: {note}" for note in notes)]))
    else:
        reasons = () if outcome == UNUSABLE else refusals
        typer.echo("\n".join([f"{outcome}: {told}{size}", *(f"  {refusal}" for refusal in reasons)]))
    raise typer.Exit(EXIT_CODES[outcome])


def _proven(subject: str, world: int | None, option: list[str] | None) -> tuple[Schedule | Plan, Verdict]:
    """Return a schedule, by name or of a file, and the verdict on it. Raises ScheduleError and InputError."""
    if is_named(subject):
        value = built(subject, 4 if world is None else world, option)
        return value, prove(value)
    if world is not None or option:
        found = "--world or -o for a file"
        raise InputError(f"verify {printable(subject)}", found, "A file says all of that itself")
    with limited(Path(subject)):
        value = read_file(Path(subject))
        return value, prove(value)
