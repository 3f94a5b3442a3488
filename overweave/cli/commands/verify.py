"""`overweave verify FILE`: the proof of a schedule file, as an exit code and reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from overweave.cli.plans import prove
from overweave.errors import ScheduleFileError
from overweave.ir.schedule import Schedule
from overweave.ir.text.files import read_file
from overweave.ir.verify.verdict import Verdict

PROVEN, REFUTED, UNUSABLE = 0, 1, 2


def verify(
    file: Annotated[Path, typer.Argument(help="JSON or text, as `overweave show` writes them.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove that a schedule cannot hang or race and meets its goal: exit 0 proven, 1 refuted, 2 unusable input."""
    try:
        value = read_file(file)
        verdict = prove(value)
    except ScheduleFileError as error:
        typer.echo(_object(str(file), "unusable", [{"message": str(error)}]) if as_json else f"unusable: {error}")
        raise typer.Exit(UNUSABLE) from None
    schedule = value if isinstance(value, Schedule) else value.schedule
    if as_json:
        said = "proven" if verdict.ok else "refuted"
        typer.echo(_object(verdict.name, said, msgspec.to_builtins(verdict.refusals), verdict.notes))
    else:
        typer.echo(_report(verdict, schedule))
    raise typer.Exit(PROVEN if verdict.ok else REFUTED)


def _report(verdict: Verdict, schedule: Schedule) -> str:
    size = f"{len(schedule.operations)} operations on {schedule.world_size} ranks"
    if verdict.ok:
        said = f"proven: {verdict.name}, {size}: no deadlock, no race, the goal is met in order, slots may be reused"
        return "\n".join([said, *(f"  note: {note}" for note in verdict.notes)])
    return "\n".join([f"refuted: {verdict.name}, {size}", *(f"  {refusal}" for refusal in verdict.refusals)])


def _object(name: str, verdict: str, refusals: object, notes: tuple[str, ...] = ()) -> str:
    found = {"name": name, "verdict": verdict, "refusals": refusals, "notes": notes}
    return msgspec.json.encode(found).decode()
