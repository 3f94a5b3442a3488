"""Schedules of library collectives in front of kernels and behind them, in one stream: what overlapped plans are
compared with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from overweave.ir.dtype import MovedDtype
from overweave.ir.schedule import (
    Apply,
    Buffer,
    Collective,
    Goal,
    InitialContents,
    Operation,
    Queue,
    Range,
    Region,
    Schedule,
)

CollectiveFunction = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
MAIN = "main"


class LibraryCalls:
    """Such a schedule under way. kernel: what runs between the collectives. A region without elements is left out."""

    def __init__(self, name: str, ranks: int, kernel: str) -> None:
        self.name, self.ranks, self.kernel = name, ranks, kernel
        self._buffers: dict[str, Buffer] = {}
        self._given: list[InitialContents] = []
        self._goal: list[Goal] = []
        self._operations: list[Operation] = []

    def buffer(
        self,
        name: str,
        shape: tuple[int, int],
        home: Literal["input", "output", "local"],
        dtype: MovedDtype | None = None,
    ) -> None:
        """Declare a matrix that every rank has."""
        self._buffers[name] = Buffer(name, *shape, home, dtype=dtype)

    def region(self, name: str, rank: int, rows: Range | None = None, cols: Range | None = None) -> Region:
        """Return a rectangle of a buffer; all rows, all columns by default."""
        known = self._buffers[name]
        return Region(name, rank, rows or (0, known.rows), cols or (0, known.cols))

    def give(self, region: Region, tensor: str, row: int = 0) -> None:
        """A caller's matrix holds rows of a tensor."""
        if not region.is_empty:
            self._given.append(InitialContents(region, tensor, row, 0))

    def want(self, region: Region, tensor: str, row: int = 0, terms: tuple[Range, ...] = ()) -> None:
        """A result is to hold rows of a tensor, summed over terms."""
        if not region.is_empty:
            self._goal.append(Goal(region, tensor, row, 0, terms))

    def collective(
        self, rank: int, called: tuple[CollectiveFunction, str], sides: tuple[Iterable[Region], Iterable[Region]]
    ) -> None:
        """A rank's part of a collective. called: its function, and what tells it from others. sides: sources, and
        destinations."""
        function, what = called
        label = f"{function}_{what}"
        self._operations.append(
            Collective(
                name=f"{label}.{rank}",
                rank=rank,
                queue=MAIN,
                function=function,
                label=label,
                ranks=tuple(range(self.ranks)),
                sources=tuple(sides[0]),
                destinations=tuple(sides[1]),
            )
        )

    def apply(self, rank: int, needs: Iterable[InitialContents], makes: Iterable[Goal]) -> None:
        """The kernel, as one tile."""
        self._operations.append(
            Apply(
                name=f"{self.kernel}.{rank}",
                rank=rank,
                queue=self._queue,
                function=self.kernel,
                needs=tuple(each for each in needs if not each.region.is_empty),
                makes=tuple(each for each in makes if not each.region.is_empty),
                tiles=((0, 1),),
            )
        )

    def schedule(self) -> Schedule:
        """Return what was written."""
        return Schedule(
            name=self.name,
            world_size=self.ranks,
            buffers=tuple(self._buffers.values()),
            queues=(Queue(MAIN, "complete", (self._queue,)), Queue(self._queue, "issue", (MAIN,))),
            given=tuple(self._given),
            goal=tuple(self._goal),
            operations=tuple(self._operations),
        )

    @property
    def _queue(self) -> str:
        return f"{MAIN}.{self.kernel}"
