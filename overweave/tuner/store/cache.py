"""Where measurements are kept: one JSON file per fingerprint in the user's cache, and the tables of the package.

A cache of other software has another name and is never looked at.
"""

from __future__ import annotations

import re
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta, Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.problem import Problem
from overweave.ir.schedule import LIMIT
from overweave.tuner.caches import cache_folders, encoded, keep_file, recall, recall_if_readable
from overweave.tuner.space.space import is_member, is_replaced
from overweave.tuner.space.target import Target
from overweave.tuner.store.table import FORMAT, MOST_ENTRIES, Entry, Fingerprint, Knowledge, Table, bucketed

LARGEST_BYTES = 4 << 20
_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_NUMBER = re.compile(r"\b\d{3}\.\d+(?:\.\d+)?\b")


def fingerprint(target: Target, world_size: int) -> Fingerprint:
    """Of this process's software, for measurements of `world_size` ranks on a target."""
    on_gpu = target.kind == "cuda"
    return Fingerprint(
        device=target.device(world_size),
        world_size=world_size,
        driver=_driver() if on_gpu else "none",
        torch=str(torch.__version__),
        triton=version_of("triton"),
        overweave=version_of("overweave"),
    )


def knowledge(target: Target, world_size: int, operator: str | None = None) -> Knowledge:
    """What is known on this machine, of one operator or (None) of all, read from the files anew.

    Warns of a file that is ignored.
    """
    own = fingerprint(target, world_size)
    table = load(path_of(own), own, operator)
    return Knowledge(table or Table(fingerprint=own), shipped(target.device(world_size), world_size, operator))


def keep(entries: tuple[Entry, ...], own: Fingerprint) -> Path:
    """Adds entries to the user's cache, beside what other processes wrote since. Warns if it cannot be written, or not
    be read for now: what is known may be there still. What does not fit any more goes, the oldest first.
    """
    path = path_of(own)

    def made() -> bytes:
        table = recall(path, partial(_table_of, own, None), LARGEST_BYTES) or Table(fingerprint=own)
        return encoded(_fitting(table.with_entries(entries)))

    keep_file(path, made)
    return path


def _fitting(table: Table) -> Table:
    """Without the oldest entries that would make it more than is read again."""
    while len(encoded(table)) > LARGEST_BYTES:
        table = replace(table, entries=table.entries[1 + len(table.entries) // 8 :])
    return table


def path_of(own: Fingerprint) -> Path:
    """`nvidia-h200x4.1a2b3c4d5e6f.json`: readable, and another file for any other software."""
    name = re.sub(r"[^a-z0-9]+", "-", own.device.lower()).strip("-")[:64]
    return cache_folders()["overweave"] / "tuner" / f"{name}x{own.world_size}.{own.digest}.json"


def load(path: Path, own: Fingerprint, operator: str | None = None) -> Table | None:
    """The table in a file, or its rows of one operator. None where there is none that this machine may use: a warning
    says why a file is ignored.
    """
    return recall_if_readable(path, partial(_table_of, own, operator), LARGEST_BYTES)


def _table_of(own: Fingerprint, operator: str | None, data: bytes) -> Table:
    """Raises InputError for what is no table of this machine's."""
    table = decode(data, operator)
    if table.fingerprint != own:
        raise InputError("tuner cache", f"it was measured elsewhere: {table.fingerprint}", "")
    return table


def decode(data: bytes, operator: str | None = None) -> Table:
    """The table that was `encoded`, or its rows of one operator. Raises InputError for any other bytes."""
    try:
        table = _rows_of(data, operator)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InputError("tuner cache", f"it holds no table: {error}", "") from None
    table = replace(table, entries=tuple(filter(None, map(_without_replaced, table.entries))))
    for entry in table.entries:
        if not _belongs(entry.problem, table.fingerprint):
            raise InputError("tuner cache", f"{entry.problem} does not belong there", "")
        for time in entry.times:
            if not is_member(entry.problem.operator, time.candidate):
                raise InputError("tuner cache", f"{time.candidate} of {entry.problem.operator} is none of ours", "")
    return table


def _without_replaced(entry: Entry) -> Entry | None:
    """The entry without times of schedules that are gone; None where no time is left."""
    times = tuple(time for time in entry.times if not is_replaced(entry.problem.operator, time.candidate))
    return replace(entry, times=times) if times else None


def _belongs(problem: Problem, fingerprint: Fingerprint) -> bool:
    """Whether somebody can have measured it, and under that name."""
    extents = problem.m, problem.n, problem.k
    is_possible = min(extents) >= 1 and max(extents) <= LIMIT and sum(problem.columns) in (0, problem.n)
    return is_possible and problem.world_size == fingerprint.world_size and problem == bucketed(problem)


@cache
def shipped(device: str, world_size: int, operator: str | None = None) -> Table | None:
    """The package's table for a device and number of ranks, or its rows of one operator. Its software may be another:
    the table is a first guess. Tests hold its rows to what `decode` asks of a file; a lookup does not ask again.
    """
    for data in shipped_files().values():
        found = msgspec.json.decode(data, type=_UnreadTable).fingerprint
        if (found.device, found.world_size) == (device, world_size):
            return _rows_of(data, operator)
    return None


@cache
def shipped_files() -> dict[str, bytes]:
    """The tables of the package as they lie there, by file name."""
    folder = files("overweave.tuner") / "tables"
    named = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return {file.name: file.read_bytes() for file in named}


class _Operator(Struct, frozen=True):
    """Of a problem, its operator alone."""

    operator: str


class _RowOperator(Struct, frozen=True):
    """Of a row, its operator alone."""

    problem: _Operator


class _UnreadTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table whose rows are not decoded yet."""

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)] = FORMAT
    fingerprint: Fingerprint
    entries: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MOST_ENTRIES)] = ()


def _rows_of(data: bytes, operator: str | None) -> Table:
    """The table with the rows of one operator: no others are decoded. Raises what msgspec raises."""
    if operator is None:
        return msgspec.json.decode(data, type=Table)
    unread = msgspec.json.decode(data, type=_UnreadTable)
    told = msgspec.json.Decoder(_RowOperator)
    rows = b",".join(bytes(row) for row in unread.entries if told.decode(row).problem.operator == operator)
    entries = msgspec.json.decode(b"[" + rows + b"]", type=tuple[Entry, ...]) if rows else ()
    return Table(fingerprint=unread.fingerprint, entries=entries)


def version_of(package: str) -> str:
    """Of a package, as results tell it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@cache
def _driver() -> str:
    try:
        number = _DRIVER_NUMBER.search(_DRIVER.read_text())
    except OSError:
        number = None
    return number.group() if number else "unknown"
