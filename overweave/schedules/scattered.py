"""What reduce-scatters share: their buffers, and where each piece lies in them."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from overweave.ir.schedule import Buffer, Copy, Notify, Range, Wait
from overweave.ir.shards import piece_rows
from overweave.schedules.communication import ARRIVED, COMPUTED, Chunk, Split, is_empty, region, shifted

FINISHED = "finished"  # pad: a part of the own shard is stored


class Scatter(Struct, frozen=True):
    split: Split
    partial: Buffer
    slots: Buffer
    running: Buffer
    y: Buffer
    sums: str  # the queue that sums in a scatter
    own_pieces: int  # in how many parts a rank computes and sums its own shard

    def own_parts(self, rank: int) -> list[Range]:
        """Rows of the partial that stay here, in parts: one is summed while the next one is computed. None is empty."""
        parts = piece_rows(self.split.shard(rank), self.own_pieces, self.split.alignment)
        return [rows for rows in parts if not is_empty(rows)]

    def chunk(self, rank: int, peer: int, piece: int, signals: bool) -> Iterator[Chunk]:
        """The part of the partial that belongs to a peer's piece; nothing if that is empty."""
        rows = self.split.piece(peer, piece)
        if not is_empty(rows):
            notifies = (Notify(COMPUTED, rank, self.split.signal(peer, piece)),) if signals else ()
            name, part = f"multiply.{rank}-{peer}.{piece}", region(self.partial, rank, rows)
            yield Chunk(name=name, rank=rank, rows=rows, region=part, notifies=notifies)

    def arrived(self, rank: int, rows: Range) -> Wait:
        """For all that peers announce of the pieces in which some rows of the own shard lie, and of those before."""
        split, hi = self.split, self.split.shard(rank)[1]
        pieces = range(split.pieces)
        needed = len(pieces) if rows[1] == hi else sum(split.piece(rank, piece)[0] < rows[1] for piece in pieces)
        return Wait(ARRIVED, (0, needed * (split.world_size - 1)), 1)

    def idle(self, rank: int, queue: str) -> Copy:
        """A rank without a shard only takes note that its peers have announced nothing."""
        waits = (self.arrived(rank, self.split.shard(rank)),)
        return Copy(name=f"idle.{rank}", rank=rank, queue=queue, waits=waits, sources=(), destinations=())

    def slot_rows(self, slot: int, rank: int, piece: int) -> Range:
        """Rows of `slots` where a piece of `rank`'s shard lands: each slot holds one shard."""
        return self.split.in_slot(rank, slot, self.split.piece(rank, piece))

    def y_rows(self, rank: int, piece: int) -> Range:
        return shifted(self.split.piece(rank, piece), -self.split.shard(rank)[0])
