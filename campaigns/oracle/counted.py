"""Calls whose counts fill blocks of rows in part, as the judge of verify sees them, sharing no code with it.

A counted buffer has a block of rows for each rank. The rows that a call fills lie one behind the other from the first
row of the buffer on. Whoever moves rows of it moves those that are there, and beside them, of a buffer that is not
counted, as many from the region's first row on.
"""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from campaigns.oracle.permuted import Malformed
from overweave.ir.schedule import Collective, Compute, Copy, Get, Operation, Put, Range, Reduce, Region, Schedule

Counts = tuple[tuple[int, ...], ...]  # by source and target
PAIRS = 6


def pairs_of_counts(schedule: Schedule) -> list[tuple[Counts, Counts]]:
    """Counts of two calls in turn: as many pairs as tell most mistakes; one of none where no buffer is counted."""
    size = schedule.world_size
    most = max((buffer.rows // size for buffer in schedule.buffers if buffer.counted), default=0)
    if not any(buffer.counted for buffer in schedule.buffers):
        return [((), ())]
    rng = Random(f"{size} {most}")

    def drawn(few: bool) -> Counts:
        choices = (0, most) if few else range(most + 1)
        return tuple(tuple(rng.choice(choices) for _ in range(size)) for _ in range(size))

    full: Counts = ((most,) * size,) * size
    return [(full, full), *((drawn(at % 2 == 0), drawn(at % 3 == 0)) for at in range(PAIRS - 1))]


class Filling:
    """What one call fills."""

    def __init__(self, schedule: Schedule, counts: Counts) -> None:
        self.counts, self.size = counts, schedule.world_size
        self.counted = {buffer.name: buffer for buffer in schedule.buffers if buffer.counted}

    def operation(self, operation: Operation) -> Operation:
        """The operation as the call runs it."""
        if not any(part.buffer in self.counted for part in (*operation.reads, *operation.writes)):
            return operation
        match operation:
            case Put() | Get() | Copy():
                ends = self._beside(operation.sources, operation.destinations)
                return replace(operation, sources=ends[0], destinations=ends[1])
            case Compute():
                ends = self._beside(operation.a, operation.out)
                return replace(operation, a=ends[0], out=ends[1])
            case Reduce():
                ends = self._beside(operation.operands, (operation.out,))
                return replace(operation, operands=ends[0], out=ends[1][0])
            case Collective():
                ends = tuple(tuple(map(self.region, side)) for side in (operation.sources, operation.destinations))
                return replace(operation, sources=ends[0], destinations=ends[1])
        raise Malformed(f"{operation.name} knows nothing of counts")

    def _beside(self, ones: tuple[Region, ...], others: tuple[Region, ...]) -> tuple[tuple[Region, ...], ...]:
        if len(ones) != len(others):
            raise Malformed("regions without others beside them")
        pairs = [(self.region(one), self.region(other)) for one, other in zip(ones, others, strict=True)]
        cut = [tuple(_top(each, min(one.shape[0], other.shape[0])) for each in (one, other)) for one, other in pairs]
        return tuple(one for one, _ in cut), tuple(other for _, other in cut)

    def region(self, region: Region) -> Region:
        """The filled rows of a region, where they lie."""
        if region.buffer not in self.counted:
            return region
        return replace(region, rows=(self._before(region, region.rows[0]), self._before(region, region.rows[1])))

    def rows(self, region: Region) -> list[tuple[int, int]]:
        """Of the rows of a region that are there: which of the region's it is, and where it lies."""
        found = []
        for at, row in enumerate(range(*region.rows)):
            lo, hi = (self._before(region, one) for one in (row, row + 1))
            found += [(at, lo)] if hi > lo or region.buffer not in self.counted else []
        return found

    def _before(self, region: Region, row: int) -> int:
        """How many rows lie before one, of those that are there."""
        if region.buffer not in self.counted:
            return row
        buffer = self.counted[region.buffer]
        block, rest = divmod(buffer.rows, self.size)
        if rest or not block or not 0 <= region.rank < self.size or not 0 <= row <= buffer.rows:
            raise Malformed(f"{region} is of no whole blocks")
        peers = range(self.size)
        fills = [
            self.counts[region.rank][peer] if buffer.counted == "sent" else self.counts[peer][region.rank]
            for peer in peers
        ]
        at, within = divmod(row, block)
        return sum(fills[:at]) + (min(within, fills[at]) if within else 0)


def _top(region: Region, height: int) -> Region:
    rows: Range = (region.rows[0], region.rows[0] + height)
    return replace(region, rows=rows)
