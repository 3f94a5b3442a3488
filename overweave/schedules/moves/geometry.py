"""Where rows lie in exchanges that add nothing: what a rank begins with, where it lands, what there is at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from msgspec import Struct

from overweave.errors import InputError
from overweave.ir.schedule import Given, Range, Region
from overweave.ir.shards import owned_rows, rows_of
from overweave.ir.tensors import received
from overweave.schedules.communication import A, X, shifted
from overweave.schedules.moves.moves import AllToAll, Gather, Held


class Gathered(Struct, frozen=True):
    """Each rank has its shard, and gets all of the tensor."""

    written: Gather
    rows: int
    cols: int
    function: ClassVar[Literal["all_gather"]] = "all_gather"

    def owned(self, rank: int) -> tuple[Range, ...]:
        """The rows that a rank has from the beginning, of what it is to have at the end."""
        return owned_rows(self.rows, self.written.world_size, rank, self.written.ranges)

    def extent(self, rank: int) -> int:
        """The rows that a rank begins with."""
        return rows_of(self.owned(rank))

    def place(self, held: Held, rows: Range) -> Range:
        """Where rows of a rank's own lie in what it begins with."""
        return held.place(rows)

    def lands(self, source: int, target: int, rows: Range) -> Range:
        """Where rows that one rank names lie at another."""
        return rows

    def sent(self, rank: int, parts: list[Range]) -> list[Range]:
        """Of each rank's part of what the library carries, what a rank gives it, in the order of ranks."""
        return [parts[rank]]

    def tensor(self, rank: int) -> str:
        """What a rank has at the end."""
        return A

    def given(self, rank: int) -> Iterator[Given]:
        """What a rank begins with."""
        first = 0
        for lo, hi in self.owned(rank):
            if lo < hi:
                yield Given(Region(X, rank, (first, first + hi - lo), (0, self.cols)), A, lo, 0)
            first += hi - lo


class Traded(Struct, frozen=True):
    """Each rank has a block for every rank, and block p of rank s becomes block s of rank p, of a tensor of its own."""

    written: AllToAll
    rows: int
    cols: int
    function: ClassVar[Literal["all_to_all"]] = "all_to_all"

    def __post_init__(self) -> None:
        if self.rows % self.written.world_size:
            found = f"{self.rows} rows are no whole blocks for {self.written.world_size} ranks"
            raise InputError("exchange all to all", found, "Pad the rows to a multiple of the ranks")

    @property
    def block(self) -> int:
        return self.rows // self.written.world_size

    def owned(self, rank: int) -> tuple[Range, ...]:
        return ((rank * self.block, (rank + 1) * self.block),)

    def extent(self, rank: int) -> int:
        return self.rows

    def place(self, held: Held, rows: Range) -> Range:
        return rows

    def lands(self, source: int, target: int, rows: Range) -> Range:
        return shifted(rows, (source - target) * self.block)

    def sent(self, rank: int, parts: list[Range]) -> list[Range]:
        return parts

    def tensor(self, rank: int) -> str:
        return received(A, rank)

    def given(self, rank: int) -> Iterator[Given]:
        for to in range(self.written.world_size):
            rows = shifted((0, self.block), to * self.block)
            yield Given(Region(X, rank, rows, (0, self.cols)), received(A, to), rank * self.block, 0)
