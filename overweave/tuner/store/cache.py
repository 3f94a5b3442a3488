"""The files of measurements: one JSON file per fingerprint in the user's cache, and the tables of the package.

A cache of other software has another name and is never read.
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

from overweave.errors import InputError, RankMismatch
from overweave.ir.problem import Problem
from overweave.ir.schedule import LIMIT
from overweave.memory.board.board import Board
from overweave.memory.group import Group, OfGroup
from overweave.tuner.caches import cache_folders, encode, read_cached, read_cached_if_readable, save_file
from overweave.tuner.space.space import is_member, is_removed
from overweave.tuner.space.target import Target
from overweave.tuner.store.table import FORMAT, MOST_ENTRIES, Entry, Fingerprint, Knowledge, Table, bucket_problem

LARGEST_BYTES = 4 << 20
_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_NUMBER = re.compile(r"\b\d{3}\.\d+(?:\.\d+)?\b")


def fingerprint(target: Target, world_size: int) -> Fingerprint:
    """Return the key of this process's software, for measurements of `world_size` ranks on a target."""
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
    """Return the measurements on this machine, of one operator or (None) of all, read from the files anew. Warns of a
    file that is ignored."""
    current = fingerprint(target, world_size)
    table = load(path_of(current), current, operator)
    return Knowledge(table or Table(fingerprint=current), shipped(target.device(world_size), world_size, operator))


def save(entries: tuple[Entry, ...], current: Fingerprint) -> Path:
    """Add entries to the user's cache, merged with what other processes wrote since. The oldest go if it grows too
    large. Warns if the file cannot be written, or cannot be read now: it may still hold measurements."""
    path = path_of(current)

    def merged_table() -> bytes:
        table = read_cached(path, partial(_table_of, current, None), LARGEST_BYTES) or Table(fingerprint=current)
        return encode(_without_oldest(table.with_entries(entries)))

    save_file(path, merged_table)
    return path


def _without_oldest(table: Table) -> Table:
    """Return the table without the oldest entries that would exceed LARGEST_BYTES."""
    while len(encode(table)) > LARGEST_BYTES:
        table = replace(table, entries=table.entries[1 + len(table.entries) // 8 :])
    return table


def path_of(key: Fingerprint) -> Path:
    """Return `nvidia-h200x4.1a2b3c4d5e6f.json`: readable, and different for any other software."""
    name = re.sub(r"[^a-z0-9]+", "-", key.device.lower()).strip("-")[:64]
    return cache_folders()["overweave"] / "tuner" / f"{name}x{key.world_size}.{key.digest}.json"


def load(path: Path, current: Fingerprint, operator: str | None = None) -> Table | None:
    """Return the table in a file, or its rows of one operator; None if there is none for this machine. Warns of a bad
    file."""
    return read_cached_if_readable(path, partial(_table_of, current, operator), LARGEST_BYTES)


def _table_of(current: Fingerprint, operator: str | None, data: bytes) -> Table:
    """Return the table of a file's content. Raises InputError if it is not a table of this machine."""
    table = decode(data, operator)
    if table.fingerprint != current:
        raise InputError("tuner cache", f"it was measured elsewhere: {table.fingerprint}", "")
    return table


def decode(data: bytes, operator: str | None = None) -> Table:
    """Return the table that was encoded, or its rows of one operator. Raises InputError for any other bytes."""
    try:
        table = _rows_of(data, operator)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InputError("tuner cache", f"it holds no table: {error}", "") from None
    table = replace(table, entries=tuple(filter(None, map(_without_removed, table.entries))))
    for entry in table.entries:
        if not _is_measurable(entry.problem, table.fingerprint):
            raise InputError("tuner cache", f"{entry.problem} does not belong there", "")
        for time in entry.times:
            if not is_member(entry.problem.operator, time.candidate):
                raise InputError("tuner cache", f"{time.candidate} of {entry.problem.operator} is none of ours", "")
    return table


def _without_removed(entry: Entry) -> Entry | None:
    """Return the entry without times of removed schedules; None if no time is left."""
    times = tuple(time for time in entry.times if not is_removed(entry.problem.operator, time.candidate))
    return replace(entry, times=times) if times else None


def _is_measurable(problem: Problem, fingerprint: Fingerprint) -> bool:
    """Whether the tuner could have measured the problem, under that fingerprint."""
    extents = problem.m, problem.n, problem.k
    is_possible = min(extents) >= 1 and max(extents) <= LIMIT and sum(problem.columns) in (0, problem.n)
    return is_possible and problem.world_size == fingerprint.world_size and problem == bucket_problem(problem)


@cache
def shipped(device: str, world_size: int, operator: str | None = None) -> Table | None:
    """Return the package's table for a device and number of ranks, or its rows of one operator; None if there is none.

    Its software may be another: the table is a first guess. A test checks all its rows as `decode` does; a look-up does
    not.
    """
    for data in shipped_files().values():
        key = msgspec.json.decode(data, type=_UnreadTable).fingerprint
        if (key.device, key.world_size) == (device, world_size):
            return _rows_of(data, operator)
    return None


@cache
def shipped_files() -> dict[str, bytes]:
    """Return file name -> content of the package's tables."""
    folder = files("overweave.tuner") / "tables"
    tables = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return {file.name: file.read_bytes() for file in tables}


class _Operator(Struct, frozen=True):
    """The operator of a problem."""

    operator: str


class _RowOperator(Struct, frozen=True):
    """The operator of a row."""

    problem: _Operator


class _UnreadTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table whose rows are not decoded yet."""

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)] = FORMAT
    fingerprint: Fingerprint
    entries: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MOST_ENTRIES)] = ()


def _rows_of(data: bytes, operator: str | None) -> Table:
    """Return the table with the rows of one operator; others are not decoded. Raises msgspec's errors."""
    if operator is None:
        return msgspec.json.decode(data, type=Table)
    unread = msgspec.json.decode(data, type=_UnreadTable)
    operators = msgspec.json.Decoder(_RowOperator)
    rows = b",".join(bytes(row) for row in unread.entries if operators.decode(row).problem.operator == operator)
    entries = msgspec.json.decode(b"[" + rows + b"]", type=tuple[Entry, ...]) if rows else ()
    return Table(fingerprint=unread.fingerprint, entries=entries)


def version_of(package: str) -> str:
    """Return the version of a package, for results."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@cache
def _driver() -> str:
    """Return the version of the NVIDIA driver."""
    try:
        number = _DRIVER_NUMBER.search(_DRIVER.read_text())
    except OSError:
        number = None
    return number.group() if number else "unknown"


# Each group stores what its ranks agreed on. So a cache that changes on disk, or a tuning in another group, cannot make
# them choose differently later.

_AGREED = OfGroup[dict[tuple[Target, str], Knowledge]]()


def agreed_knowledge(group: Group, target: Target, operator: str) -> Knowledge:
    """Return the measurements of an operator that a group's ranks agree on. The first call is collective; later ones
    are not. Raises RankMismatch on every rank if their measurements differ, and PeerError."""
    agreed = _AGREED.setdefault(group.process_group, {})
    if (target, operator) not in agreed:
        own = knowledge(target, group.world_size, operator)
        _agree(group, own, operator)
        agreed[target, operator] = own
    return agreed[target, operator]


def learn(group: Group, target: Target, entry: Entry) -> None:
    """Add an entry to a group's measurements. Every rank passes the same entry."""
    operator = entry.problem.operator
    agreed = agreed_knowledge(group, target, operator)
    _AGREED[group.process_group][target, operator] = Knowledge(agreed.own.with_entries((entry,)), agreed.shipped)


def _agree(group: Group, own: Knowledge, operator: str) -> None:
    """Compare measurements over the ranks. Raises RankMismatch with a cure."""
    path = path_of(own.own.fingerprint)
    count = len(own.own.entries)
    subject = f"a plan of {operator} chosen by what was measured"
    signature = f"{subject}, {count} {'problem' if count == 1 else 'problems'} in {path.name} ({own.digest})"
    try:
        Board.of(group).agree(signature.encode())
    except RankMismatch as error:
        if error.found.count(subject) < 2:
            raise  # one rank asks for something else altogether
        cure = (
            f"Mount one cache folder for every rank (OVERWEAVE_CACHE_DIR), or delete {path} wherever a rank reads one"
        )
        raise RankMismatch("choose one plan on every rank", error.found, cure) from None
