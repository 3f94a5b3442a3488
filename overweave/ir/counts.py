"""Counted buffers: blocks of rows of which each call fills only the first ones, as many as its counts say.

A counted buffer has one block of rows for each rank of the group, all of one size. How many rows of a block are filled
is not part of a schedule: every call brings a matrix `counts[source][target]`, the same on every rank. Filled rows are
packed from the first row of the buffer on, in the order of the blocks. A schedule names rows of whole blocks, which are
upper bounds: so one plan and one proof serve the counts of all calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from overweave.ir.schedule import Collective, Compute, Copy, Get, Operation, Put, Range, Reduce, Region, Schedule

COUNTS = "counts"  # name of the input tensor
COUNTS_DTYPE = "int64"
Counts = Sequence[Sequence[int]]
Regions = tuple[Region, ...]


def filled_per_block(counted: str, rank: int, counts: Counts) -> list[int]:
    """Return how many rows of each block of a rank's counted buffer are filled. counted: `sent` or `received`."""
    return list(counts[rank]) if counted == "sent" else [row[rank] for row in counts]


def filled_rows(rows: Range, block: int, filled: Sequence[int]) -> Range:
    """Return where the filled rows among `rows` lie in memory. block: rows of each block. filled: for each block, how
    many of its rows are filled."""
    lo, hi = (_filled_before(row, block, filled) for row in rows)
    return lo, hi


def _filled_before(row: int, block: int, filled: Sequence[int]) -> int:
    """Return how many filled rows stand before a row."""
    index, within = divmod(row, block) if block else (0, 0)
    return sum(filled[:index]) + (min(within, filled[index]) if within else 0)


def rows_of_counted(schedule: Schedule) -> dict[str, int]:
    """The buffers whose rows a call's counts fill, with all of their rows."""
    return {each.name: each.rows for each in schedule.buffers if each.counted}


class Filled:
    """Cuts the operations of a schedule to the rows that the counts of one call fill; some regions become empty."""

    def __init__(self, schedule: Schedule, counts: Counts) -> None:
        self._size, self._counts = schedule.world_size, counts
        self._counted = {each.name: (each.rows, each.counted) for each in schedule.buffers if each.counted}

    def operation(self, operation: Operation) -> Operation:
        """Return the operation on filled rows alone. It waits and notifies as before, even if its regions are empty."""
        if isinstance(operation, Put | Get | Copy):
            sources, destinations = self._paired(operation.sources, operation.destinations)
            return replace(operation, sources=sources, destinations=destinations)
        if isinstance(operation, Compute):
            a, out = self._paired(operation.a, operation.out)
            return replace(operation, a=a, out=out)
        if isinstance(operation, Reduce):
            operands, outs = self._paired(operation.operands, (operation.out,))
            return replace(operation, operands=operands, out=outs[0])
        if isinstance(operation, Collective):
            sides = [tuple(map(self._region, side)) for side in (operation.sources, operation.destinations)]
            return replace(operation, sources=sides[0], destinations=sides[1])
        return operation

    def _paired(self, left: Regions, right: Regions) -> tuple[Regions, Regions]:
        """Return regions whose rows correspond: an uncounted region is cut to the filled rows of its partner."""
        pairs = [
            _with_equal_rows(self._region(one), self._region(other)) for one, other in zip(left, right, strict=True)
        ]
        return tuple(one for one, _ in pairs), tuple(other for _, other in pairs)

    def _region(self, region: Region) -> Region:
        """Return the filled rows of a region; an uncounted region as it is."""
        if region.buffer not in self._counted:
            return region
        rows, counted = self._counted[region.buffer]
        filled = filled_per_block(counted, region.rank, self._counts)
        return replace(region, rows=filled_rows(region.rows, rows // self._size, filled))


def _with_equal_rows(one: Region, other: Region) -> tuple[Region, Region]:
    """Return the two regions cut to the rows of the shorter one."""
    rows = min(one.shape[0], other.shape[0])
    return tuple(replace(each, rows=(each.rows[0], each.rows[0] + rows)) for each in (one, other))  # type: ignore[return-value]
