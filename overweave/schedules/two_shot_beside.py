"""Two-shot all-reduce with a kernel beside the tiles: pieces are multiplied, scattered, summed and shared by turns.

A kernel on SMs of its own pushes what tiles store to its owners, whose own tiles of that piece, computed while the next
piece is already under way, add it; the same kernel tells the peers, who get the sum while later pieces are multiplied.
Only the last piece's sums travel behind the last tile: a kernel reads them, which no copy delays.
SOURCE: AutoOverlap 5 (communication on dedicated SMs); own rows last as in Flux (arXiv 2406.06858).
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.schedule import Notify, Operation, Put, Queue
from overweave.schedules.communication import (
    COMPLETE,
    COPIES,
    ISSUE,
    SUMMED,
    SUMS,
    TILES,
    Chunk,
    is_empty,
    one,
    region,
)
from overweave.schedules.reduced import Reduced
from overweave.schedules.two_shot import SHARED, got, move_of, multiplied, own_tiles, scattered

GETS = f"{COPIES}.get"  # of the copy engine: the peers' sums, while tiles are computed
LAG = 1  # pieces that are multiplied for the peers between a piece's rows for them and its own


def two_shot_beside(reduced: Reduced, rank: int) -> Iterator[Operation | Chunk]:
    """Own tiles of a piece stand behind the peers' ones of the next: what they add travels meanwhile."""
    pieces = range(reduced.split.pieces)
    for piece in range(len(pieces) + LAG):
        if piece in pieces:
            for peer in reduced.peers(rank):
                yield from multiplied(reduced, rank, peer, piece)
            yield from scattered(reduced, rank, piece)
        if piece - LAG in pieces:
            yield from _summed(reduced, rank, piece - LAG)
    for piece in pieces[:-1]:
        for owner in reduced.peers(rank):
            if not is_empty(reduced.split.piece(owner, piece)):
                yield got(reduced, rank, owner, piece, GETS)
    for owner in (*reduced.peers(rank), rank):
        for piece in pieces if owner == rank else pieces[-1:]:
            if not is_empty(reduced.split.piece(owner, piece)):
                yield move_of(reduced, rank, owner, piece)


def two_shot_beside_queues(reduced: Reduced) -> tuple[Queue, ...]:
    """Sums that are moved behind the tiles must not hold the SMs that the own pushes need."""
    gets = (Queue(GETS, COMPLETE),) if reduced.split.pieces > 1 else ()
    return Queue(COPIES, ISSUE), *gets, Queue(SUMS, ISSUE, after=(TILES, COPIES))


def _summed(reduced: Reduced, rank: int, piece: int) -> Iterator[Operation | Chunk]:
    """The own rows of a piece, and a push of nothing to every peer, which tells that they are summed."""
    rows = reduced.split.piece(rank, piece)
    if is_empty(rows):
        return
    yield own_tiles(reduced, rank, piece)
    nothing = rows[0], rows[0]
    for peer in reduced.peers(rank):
        yield Put(
            name=f"tell.{rank}-{peer}.{piece}",
            rank=rank,
            queue=COPIES,
            waits=one(SUMMED, piece),
            notifies=(Notify(SHARED, peer, reduced.split.signal(rank, piece)),),
            sources=(region(reduced.partial, rank, nothing),),
            destinations=(region(reduced.slots, peer, (0, 0)),),
        )
