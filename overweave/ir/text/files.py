"""The JSON form of Schedules and Plans, and the reader of untrusted schedule files.

A file is `{"version": 1, "schedule": {...}}` or `{"version": 1, "plan": {...}}`; keys are the fields of the types. A
file is refused before anything much larger than itself is allocated: by its size, then its depth, then while its values
are read straight into the types (which refuse unknown keys), then for duplicate keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from overweave.errors import ScheduleFileError
from overweave.ir.plan import Plan
from overweave.ir.schedule import LIMIT, Schedule
from overweave.ir.text.forms import MAX_BYTES, VERSION
from overweave.ir.text.parse import from_text
from overweave.untrusted import check_keys, check_shallow, read_bytes

_REQUEST = "read a schedule file"
_CURE = "Write it with `overweave show NAME --world W --json FILE`"


class _Envelope(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    version: Annotated[int, Meta(ge=VERSION, le=VERSION)]
    schedule: Schedule | None = None
    plan: Plan | None = None


def to_json(value: Schedule | Plan) -> bytes:
    """Return the JSON form, indented; `from_json` returns an equal value."""
    envelope = _Envelope(VERSION, schedule=value) if isinstance(value, Schedule) else _Envelope(VERSION, plan=value)
    return msgspec.json.format(msgspec.json.encode(envelope), indent=1) + b"\n"


def from_json(data: bytes) -> Schedule | Plan:
    """Decode what `to_json` wrote; the value is well-formed, but not verified. Raises ScheduleFileError."""
    if len(data) > MAX_BYTES:
        raise _error(f"{len(data)} bytes, more than {MAX_BYTES}")
    try:
        check_shallow(data)
        data.decode("utf-8")
        envelope = msgspec.json.decode(data, type=_Envelope)
        check_keys(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _error(str(error)) from None
    value = envelope.schedule or envelope.plan
    if value is None or (envelope.schedule and envelope.plan):
        raise _error("not exactly one of `schedule` and `plan`")
    if isinstance(value, Plan):
        _check_tables(value)
    return value


def read_file(path: Path) -> Schedule | Plan:
    """Return the schedule or plan of a JSON or text file. Raises ScheduleFileError, also if the file cannot be read."""
    try:
        data = read_bytes(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = printable(error.strerror or error if isinstance(error, OSError) else error)
        raise ScheduleFileError(f"open {printable(path)}", reason, "Give a file that can be read") from None
    try:
        return _value(data)
    except ScheduleFileError as error:
        raise ScheduleFileError(f"{error.asked} {printable(path)}", error.found, error.cure) from None


def printable(text: object) -> str:
    """Return at most 200 characters of a text, encodable as UTF-8: names of files are arbitrary bytes."""
    return str(text)[:200].encode(errors="replace").decode()


def _value(data: bytes) -> Schedule | Plan:
    """Decode a JSON or text file by its first character. Raises ScheduleFileError."""
    if data.lstrip()[:1] in (b"{", b"[", b""):
        return from_json(data)
    if len(data) > MAX_BYTES:
        raise _error(f"more than {MAX_BYTES} bytes")
    try:
        return from_text(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _error(str(error)) from None


def _error(message: str) -> ScheduleFileError:
    return ScheduleFileError(_REQUEST, message[:300], _CURE)


def _check_tables(plan: Plan) -> None:
    """Raise ScheduleFileError if a tile table has a number out of range."""
    for order in plan.tile_orders:
        for row in order.rows:
            if min(row) < -1 or max(row) > LIMIT:
                raise _error(f"tile order of rank {order.rank}: a number out of range")
