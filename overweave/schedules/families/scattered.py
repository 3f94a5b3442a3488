"""What reduce-scatters share: their buffers, and where each piece lies in them."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from overweave.ir.schedule import Buffer, Range, Reduce, Region
from overweave.ir.shards import piece_rows
from overweave.schedules.communication import Chunk, Split, is_empty, region, shifted


class Scatter(Struct, frozen=True):
    """partial: what tiles write. slots: what arrives, a shard from each source. y: the result."""

    split: Split
    partial: Buffer
    slots: Buffer
    y: Buffer
    sums: str  # the queue that sums in a scatter
    own_pieces: int  # in how many parts a rank computes and sums its own shard

    def own_parts(self, rank: int) -> list[Range]:
        """Rows of the partial that stay here, in parts: one is summed while the next one is computed. None is empty."""
        parts = piece_rows(self.split.shard(rank), self.own_pieces, self.split.alignment)
        return [rows for rows in parts if not is_empty(rows)]

    def part(self, rank: int, peer: int, piece: int) -> Chunk:
        """The part of a rank's partial that belongs to a peer's piece."""
        rows = self.split.piece(peer, piece)
        return Chunk(
            name=f"multiply.{rank}-{peer}.{piece}", rank=rank, rows=rows, region=region(self.partial, rank, rows)
        )

    def slot(self, rank: int, source: int, rows: Range) -> Region:
        """Where rows of a rank's own shard arrive there from a source."""
        return region(self.slots, rank, self.split.in_slot(rank, source, rows))

    def result(self, rank: int, rows: Range) -> Region:
        """Where the sum of rows of a rank's own shard lies."""
        return region(self.y, rank, shifted(rows, -self.split.shard(rank)[0]))

    def own_chunks(self, rank: int) -> Iterator[Chunk]:
        """The parts of the own shard."""
        for index, rows in enumerate(self.own_parts(rank)):
            name, part = f"multiply.{rank}.own.{index}", region(self.partial, rank, rows)
            yield Chunk(name=name, rank=rank, rows=rows, region=part)

    def sum(self, rank: int, index: int, rows: Range, operands: tuple[Region, ...]) -> Reduce:
        """The sum of a part of the own shard."""
        out = self.result(rank, rows)
        return Reduce(name=f"sum.{rank}.{index}", rank=rank, queue=self.sums, operands=operands, out=out)
