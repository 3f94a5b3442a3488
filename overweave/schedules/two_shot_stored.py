"""Two-shot all-reduce without copies: tiles store at their owner, whose own tiles add, and store at every rank.

Both shots leave with the end of a tile. What remains behind the last one is to move the sums, which by then lie in the
own workspace, to the caller's `y`.
SOURCE: Flux (arXiv 2406.06858) 4.1 for the first shot; the second is its counterpart.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from overweave.ir.schedule import Notify, Operation, Queue, SignalPad
from overweave.schedules.communication import ARRIVED, ISSUE, SUMS, TILES, Chunk, Split, is_empty, one
from overweave.schedules.reduced import Reduced
from overweave.schedules.two_shot import SHARED, move_of, own_tiles


def two_shot_stored(reduced: Reduced, rank: int) -> Iterator[Operation | Chunk]:
    """The peers' tiles first, then the own ones; the own sums are moved first, as they are surely there."""
    split, peers = reduced.split, reduced.peers(rank)
    for step, piece in split.steps():
        owner = split.peer(rank, step)
        rows = split.piece(owner, piece)
        if not is_empty(rows):
            yield Chunk(
                name=f"store.{rank}-{owner}.{piece}",
                rank=rank,
                rows=rows,
                region=reduced.in_slot(owner, rank, rows),
                notifies=(Notify(ARRIVED, owner, piece),),
            )
    for piece in range(split.pieces):
        if not is_empty(split.piece(rank, piece)):
            yield _everywhere(reduced, rank, piece)
    for owner in (rank, *reversed(peers)):
        for piece in range(split.pieces):
            if not is_empty(split.piece(owner, piece)):
                move = move_of(reduced, rank, owner, piece, is_here=True)
                yield replace(move, waits=one(SHARED, split.signal(owner, piece)))


def two_shot_stored_pads(split: Split) -> tuple[SignalPad, ...]:
    """For each own piece the tiles of all peers, and for each piece of all the tiles of its owner."""
    return SignalPad(ARRIVED, split.pieces), SignalPad(SHARED, split.world_size * split.pieces)


def two_shot_stored_queues(reduced: Reduced) -> tuple[Queue, ...]:
    return (Queue(SUMS, ISSUE, after=(TILES,)),)


def _everywhere(reduced: Reduced, rank: int, piece: int) -> Chunk:
    """The own tiles of a piece, whose sums every rank gets in the same place."""
    own = own_tiles(reduced, rank, piece)
    signal = reduced.split.signal(rank, piece)
    return replace(
        own,
        copies=tuple(replace(own.region, rank=peer) for peer in reduced.peers(rank)),
        notifies=tuple(Notify(SHARED, one_of, signal) for one_of in range(reduced.size)),
        late_waits=one(ARRIVED, piece),
    )
