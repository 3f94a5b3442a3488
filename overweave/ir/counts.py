"""Blocks of rows that a call fills in part: which of their rows the counts of a call fill, and where these lie.

The rows of a counted buffer are one block for each rank of the group, all of one size. How many rows of a block are
filled is no part of a schedule: every call brings a matrix `counts[source][target]`, the same on every rank. Filled
rows lie one behind the other from the first row of the buffer on, those of one block behind those of the block before.
A schedule names rows of whole blocks, which are upper bounds: so one plan and one proof serve the counts of all calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from overweave.ir.schedule import Collective, Compute, Copy, Get, Operation, Put, Range, Reduce, Region, Schedule

COUNTS = "counts"  # the input of a call that brings them
COUNTS_DTYPE = "int64"
Counts = Sequence[Sequence[int]]
Regions = tuple[Region, ...]


def filled_of(counted: str, rank: int, counts: Counts) -> list[int]:
    """How many rows of each block of a rank's counted buffer are filled."""
    return list(counts[rank]) if counted == "sent" else [row[rank] for row in counts]


def filled_rows(rows: Range, block: int, filled: Sequence[int]) -> Range:
    """Where the filled ones of some rows lie in memory. block: rows of each block. filled: how many of each are."""
    lo, hi = (_place(row, block, filled) for row in rows)
    return lo, hi


def _place(row: int, block: int, filled: Sequence[int]) -> int:
    """How many filled rows stand before a row."""
    index, within = divmod(row, block) if block else (0, 0)
    return sum(filled[:index]) + (min(within, filled[index]) if within else 0)


def rows_of_counted(schedule: Schedule) -> dict[str, int]:
    """The buffers whose rows a call's counts fill, with all of their rows."""
    return {each.name: each.rows for each in schedule.buffers if each.counted}


class Filled:
    """The operations of a schedule as the counts of one call have them: regions of filled rows, some of them empty."""

    def __init__(self, schedule: Schedule, counts: Counts) -> None:
        self._size, self._counts = schedule.world_size, counts
        self._counted = {each.name: (each.rows, each.counted) for each in schedule.buffers if each.counted}

    def operation(self, operation: Operation) -> Operation:
        """The operation on filled rows alone. It waits and signals as ever, even where there are none."""
        if isinstance(operation, Put | Get | Copy):
            sources, destinations = self._paired(operation.sources, operation.destinations)
            return replace(operation, sources=sources, destinations=destinations)
        if isinstance(operation, Compute):
            a, out = self._paired(operation.a, operation.out)
            return replace(operation, a=a, out=out)
        if isinstance(operation, Reduce):
            summed, made = self._paired(operation.operands, (operation.out,))
            return replace(operation, operands=summed, out=made[0])
        if isinstance(operation, Collective):
            sides = [tuple(map(self._region, side)) for side in (operation.sources, operation.destinations)]
            return replace(operation, sources=sides[0], destinations=sides[1])
        return operation

    def _paired(self, ones: Regions, others: Regions) -> tuple[Regions, Regions]:
        """Regions whose rows correspond: one that is not counted has as many rows as there are filled beside it."""
        pairs = [_as_many(self._region(one), self._region(other)) for one, other in zip(ones, others, strict=True)]
        return tuple(one for one, _ in pairs), tuple(other for _, other in pairs)

    def _region(self, region: Region) -> Region:
        if region.buffer not in self._counted:
            return region
        rows, counted = self._counted[region.buffer]
        filled = filled_of(counted, region.rank, self._counts)
        return replace(region, rows=filled_rows(region.rows, rows // self._size, filled))


def _as_many(one: Region, other: Region) -> tuple[Region, Region]:
    rows = min(one.shape[0], other.shape[0])
    return tuple(replace(each, rows=(each.rows[0], each.rows[0] + rows)) for each in (one, other))  # type: ignore[return-value]
