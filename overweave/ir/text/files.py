"""The JSON form of Schedules and Plans, and the reading of files that nobody vouches for.

An envelope `{"version": 1, "schedule": {...}}` or `{"version": 1, "plan": {...}}`; keys are the fields of the types.
A file is refused before anything much larger than itself is allocated: by its size, then its depth, then while its
values are read straight into the types (which knows no other keys), then for keys that stand twice.
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

_ASKED = "read a schedule file"
_CURE = "Write it with `overweave show NAME --world W --json FILE`"


class _Envelope(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    version: Annotated[int, Meta(ge=VERSION, le=VERSION)]
    schedule: Schedule | None = None
    plan: Plan | None = None


def to_json(value: Schedule | Plan) -> bytes:
    """The JSON form, indented; `from_json` returns an equal value."""
    envelope = _Envelope(VERSION, schedule=value) if isinstance(value, Schedule) else _Envelope(VERSION, plan=value)
    return msgspec.json.format(msgspec.json.encode(envelope), indent=1) + b"\n"


def from_json(data: bytes) -> Schedule | Plan:
    """What `to_json` wrote. Raises ScheduleFileError. What it returns is well-formed, not proven: verify it."""
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
    """A JSON or text file's schedule or plan. Raises ScheduleFileError, also when it cannot be read."""
    try:
        data = read_bytes(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        found = shown(error.strerror or error if isinstance(error, OSError) else error)
        raise ScheduleFileError(f"open {shown(path)}", found, "Give a file that can be read") from None
    try:
        return _value(data)
    except ScheduleFileError as error:
        raise ScheduleFileError(f"{error.asked} {shown(path)}", error.found, error.cure) from None


def shown(words: object) -> str:
    """A name, or what was said of it, in characters that JSON and terminals have: names of files are any bytes."""
    return str(words)[:200].encode(errors="replace").decode()


def _value(data: bytes) -> Schedule | Plan:
    """What the bytes of a JSON or text file hold. Raises ScheduleFileError."""
    if data.lstrip()[:1] in (b"{", b"[", b""):
        return from_json(data)
    if len(data) > MAX_BYTES:
        raise _error(f"more than {MAX_BYTES} bytes")
    try:
        return from_text(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _error(str(error)) from None


def _error(found: str) -> ScheduleFileError:
    return ScheduleFileError(_ASKED, found[:300], _CURE)


def _check_tables(plan: Plan) -> None:
    for order in plan.tile_orders:
        for row in order.rows:
            if min(row) < -1 or max(row) > LIMIT:
                raise _error(f"tile order of rank {order.rank}: a number out of range")
