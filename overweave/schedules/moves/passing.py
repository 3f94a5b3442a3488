"""Rows of an all-to-all that travel by way of third ranks: where they lie between two moves."""

from __future__ import annotations

from collections import Counter

from overweave.errors import ScheduleError
from overweave.ir.schedule import Range, Region
from overweave.schedules.moves.moves import Box

PASSED = "passed"  # the buffer of these rows


class PassedRows:
    """What has come to ranks for others.

    reads, writes: position of a move -> what it reads there, and what it writes.
    """

    def __init__(self) -> None:
        self.reads: dict[int, Region] = {}
        self.writes: dict[int, Region] = {}
        self._arrived: dict[
            tuple[int, int], list[tuple[Box, int]]
        ] = {}  # (rank, origin) -> rectangles, first rows there
        self._height: Counter[int] = Counter()  # rows in use on each rank

    def arrive(self, at: int, rank: int, origin: int, box: Box) -> None:
        """Note that a move brings a rectangle of `origin` to a rank, whose it is not."""
        top = self._height[rank]
        self._height[rank] += box.rows[1] - box.rows[0]
        self._arrived.setdefault((rank, origin), []).append((box, top))
        self.writes[at] = _region(rank, (top, self._height[rank]), box)

    def leave(self, at: int, rank: int, origin: int, box: Box) -> None:
        """Note that a move passes a rectangle on. Raises ScheduleError unless one move has brought all of it."""
        for whole, top in self._arrived.get((rank, origin), ()):
            if whole.common(box) == box:
                first = top + box.rows[0] - whole.rows[0]
                self.reads[at] = _region(rank, (first, first + box.rows[1] - box.rows[0]), box)
                return
        found = f"no earlier move has brought it to rank {rank} for others"
        raise ScheduleError(f"move {at}: pass on {box} of rank {origin}", found, "Put the move that brings it first")


def _region(rank: int, rows: Range, box: Box) -> Region:
    return Region(PASSED, rank, rows, box.cols)
