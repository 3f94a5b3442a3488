"""Tables of measurements: problems with the times of the candidates that were tried.

Problems are grouped into buckets of rows, so that a new number of rows need not be measured; a problem without a
measurement takes the nearest one that has one. Which file a table comes from is not known here (tuner/store/cache.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from overweave.ir.problem import Problem
from overweave.schedules.records.outside import OUTSIDE
from overweave.tuner.space.space import Candidate, candidate

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
