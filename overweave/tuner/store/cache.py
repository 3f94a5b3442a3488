"""The files of measurements: one JSON file per fingerprint in the user's cache, and the tables of the package.

A cache of other software has another name and is never read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import cache, cached_property, partial
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta, Struct
from msgspec.structs import replace

from overweave.compat.versions import installed
from overweave.errors import InputError, RankMismatch
from overweave.ir.problem import Problem
from overweave.ir.schedule import LIMIT
from overweave.memory.board.board import Board
from overweave.memory.group import Group, OfGroup
from overweave.schedules.records.outside import OUTSIDE
from overweave.tuner.caches import cache_folders, encode, read_cached, read_cached_if_readable, save_file
from overweave.tuner.space.space import Candidate, candidate, is_member, is_removed
from overweave.tuner.space.target import Target

# Problems are grouped into buckets of rows, so that a new number of rows need not be measured; a problem without a
# measurement takes the nearest one that has one. Which file a table comes from is not known here
# (tuner/store/cache.py).

FORMAT = 1
MOST_ENTRIES = 4096
TIE = 0.02  # relative difference of medians of one plan from run to run
# Largest distance of a neighbour, in factors of two over all extents; beyond it the model is better.
# MEASURED: each of 72 problems left out in turn: up to 0.5 the neighbour's winner loses 0.8 % in the mean and the model
# 0.3 %, up to 1.0 it is 8 % and 1 %, because small problems change sides (W=2 and 4, H200, 2026-11-20).
FARTHEST = 0.5
LAYOUT_STEP, GATHERED_STEP, EPILOGUE_STEP, COLUMNS_STEP = 0.1, 0.25, 0.1, 0.1

Word = Annotated[str, Meta(min_length=1, max_length=128)]
OptionValue = Annotated[int, Meta(ge=0, le=1 << 20)] | Annotated[str, Meta(max_length=32)]
Microseconds = Annotated[float, Meta(gt=0, lt=1e9)]
ChoiceSource = Literal["cache", "table", "nearest", "model", "rule", "asked"]


class Fingerprint(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The key of measurements: device, software and number of ranks."""

    device: Word
    world_size: Annotated[int, Meta(ge=1, le=1024)]
    driver: Word
    torch: Word
    triton: Word
    overweave: Word

    @property
    def digest(self) -> str:
        return _digest(msgspec.json.encode(self))


class Time(Struct, frozen=True, forbid_unknown_fields=True):
    """The time of a candidate: median over rounds, slowest rank."""

    plan: Word
    options: Annotated[dict[Word, OptionValue], Meta(max_length=16)]
    us: Microseconds

    @property
    def candidate(self) -> Candidate:
        return candidate(self.plan, self.options)


def ranked(operator: str, times: Iterable[Time]) -> tuple[Time, ...]:
    """Return times of an operator in order of preference: fastest first, but among ties the one with the least host
    time."""
    by_time = sorted(times, key=_called_us)
    ties = [time for time in by_time if _called_us(time) <= _called_us(by_time[0]) * (1 + TIE)]
    return (*sorted(ties, key=lambda time: _host_steps(operator, time.candidate)), *by_time[len(ties) :])


def _called_us(time: Time) -> float:
    """Return the time of a call, at least its host time."""
    return max(time.us, OUTSIDE[time.plan].host_us) if time.plan in OUTSIDE else time.us


def _host_steps(operator: str, candidate: Candidate) -> int:
    """Return roughly how much the host launches: for an order, not for a time.

    MEASURED: calls queued one behind the other cost the host 50 to 85 us with one piece a shard, 60 to 230 us with two,
    because deep copy graphs fill a queue, and 280 to 720 us with torch's fused operators (mlp, 4 x H200, 2026-11-20).
    torch's all-reduces 17 to 50 us, the library's 38 to 107 us (Llama-3, 16 to 2,048 rows, 4 x H200, 2026-11-20).
    """
    if candidate.is_by_torch:
        return OUTSIDE[candidate.plan].host_steps
    return 0 if candidate.is_plain(operator) else int(dict(candidate.options).get("pieces", 1))


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """A problem, with the rows of its bucket, and its measured times, the fastest first."""

    problem: Problem
    times: Annotated[tuple[Time, ...], Meta(min_length=1, max_length=64)]


class Table(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All measurements of one fingerprint."""

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)] = FORMAT
    fingerprint: Fingerprint
    entries: Annotated[tuple[Entry, ...], Meta(max_length=MOST_ENTRIES)] = ()

    def with_entries(self, entries: tuple[Entry, ...]) -> Table:
        """Return the table with these entries added or replaced; beyond the limit the oldest go."""
        by_problem = {entry.problem: entry for entry in self.entries}
        for entry in entries:
            by_problem.pop(entry.problem, None)
            by_problem[entry.problem] = entry
        return replace(self, entries=tuple(by_problem.values())[-MOST_ENTRIES:])


class TableMatch(Struct, frozen=True):
    """The entry for a problem, and where it came from. distance: 0 for the problem itself."""

    entry: Entry
    source: ChoiceSource
    distance: float = 0.0


class Knowledge:
    """The tables that one group chooses by: this machine's measurements, and the package's."""

    def __init__(self, own: Table, shipped: Table | None) -> None:
        self.own, self.shipped = own, shipped
        tables: tuple[tuple[ChoiceSource, Table | None], ...] = (("cache", own), ("table", shipped))
        self._known: dict[Problem, TableMatch] = {}  # bucket -> its measurement, ours before the package's
        for source, table in tables:
            for entry in table.entries if table else ():
                self._known.setdefault(entry.problem, TableMatch(entry, source))

    @cached_property
    def digest(self) -> str:
        """Return a digest that is equal on ranks that would choose alike."""
        tables = [table.entries for table in (self.own, self.shipped) if table]
        return _digest(msgspec.json.encode(tables, order="sorted"))

    def find(self, problem: Problem) -> TableMatch | None:
        """Return this machine's measurement of the problem's bucket, the package's, or that of the nearest
        neighbour."""
        wanted = bucket_problem(problem)
        if wanted in self._known:
            return self._known[wanted]
        near = min(((distance(wanted, known), index) for index, known in enumerate(self._known)), default=(math.inf, 0))
        if near[0] > FARTHEST:
            return None
        return replace(list(self._known.values())[near[1]], source="nearest", distance=near[0])


def bucket(rows: int) -> int:
    """Return the next power of two, or one and a half of one: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    if rows < 2:
        return rows
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 else power


def bucket_problem(problem: Problem) -> Problem:
    """Return the problem that stands for all of its bucket."""
    return replace(problem, m=bucket(problem.m))


def distance(one: Problem, other: Problem) -> float:
    """Return the distance of two problems in factors of two over all extents; infinite if they compute different
    things."""
    if _kind(one) != _kind(other) or not (one.m and other.m):
        return math.inf
    extents = ((one.m, other.m), (one.multiplied_columns, other.multiplied_columns), (one.k, other.k))
    steps = sum(abs(math.log2(a / b)) for a, b in extents)
    steps += LAYOUT_STEP * (one.b_is_transposed != other.b_is_transposed)
    steps += EPILOGUE_STEP * ((one.epilogue != other.epilogue) + (one.of_rows != other.of_rows))
    steps += COLUMNS_STEP * (one.columns != other.columns)
    return steps + GATHERED_STEP * (one.returns_gathered != other.returns_gathered)


def _kind(problem: Problem) -> Problem:
    same = replace(problem.without_endings, m=0, n=0, k=0, columns=())
    return replace(same, b_is_transposed=False, returns_gathered=False)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=6).hexdigest()


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
        triton=installed("triton"),
        overweave=installed("overweave"),
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
