"""All-reduces without copies: tiles store at a peer, and those that make the whole sum, their owner's, at every rank.

Both shots leave with the end of a tile. What remains behind the last one is to move the sums, which by then lie in the
own workspace, to the caller's `y`. The first shot is that of a reduce-scatter: straight to the owner, or round a ring
(schedules/scatter_stored.py).
SOURCE: Flux (arXiv 2406.06858) 4.1 for the first shot; the second is its counterpart.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from overweave.ir.schedule import Notify, Operation, Queue, SignalPad
from overweave.schedules.communication import ARRIVED, ISSUE, SUMS, TILES, Chunk, Split, is_empty, one, region, shifted
from overweave.schedules.reduced import Reduced
from overweave.schedules.two_shot import SHARED, move_of, own_tiles


def two_shot_stored(reduced: Reduced, rank: int) -> Iterator[Operation | Chunk]:
    """The peers' tiles first, then the own ones."""
    split = reduced.split
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
            yield _everywhere(
                reduced, rank, piece, replace(own_tiles(reduced, rank, piece), late_waits=one(ARRIVED, piece))
            )
    yield from _moved(reduced, rank)


def ring_stored(reduced: Reduced, rank: int) -> Iterator[Operation | Chunk]:
    """Each tile adds the sum that arrived, and stores its own at the next rank; at last its owner's at every rank."""
    split, following = reduced.split, (rank + 1) % reduced.size
    for step in range(1, reduced.size + 1):
        owner, starts, ends = (rank - step) % reduced.size, step == 1, step == reduced.size
        for piece in range(split.pieces):
            rows, signal = split.piece(owner, piece), split.signal(owner, piece)
            if is_empty(rows):
                continue
            slot = shifted(rows, owner * split.shard_size - split.shard(owner)[0])
            chunk = Chunk(
                name=f"pass.{rank}-{owner}.{piece}",
                rank=rank,
                rows=rows,
                region=region(reduced.total, rank, rows) if ends else region(reduced.slots, following, slot),
                notifies=() if ends else (Notify(ARRIVED, following, signal),),
                addends=() if starts else (region(reduced.slots, rank, slot),),
                place=0 if starts else 1,
                late_waits=() if starts else one(ARRIVED, signal),
            )
            yield _everywhere(reduced, rank, piece, chunk) if ends else chunk
    yield from _moved(reduced, rank)


def ring_stored_pads(split: Split) -> tuple[SignalPad, ...]:
    """For each piece of all the tiles of the previous rank, and those of its owner."""
    every = split.world_size * split.pieces
    return SignalPad(ARRIVED, every), SignalPad(SHARED, every)


def two_shot_stored_pads(split: Split) -> tuple[SignalPad, ...]:
    """For each own piece the tiles of all peers, and for each piece of all the tiles of its owner."""
    return SignalPad(ARRIVED, split.pieces), SignalPad(SHARED, split.world_size * split.pieces)


def stored_queues(reduced: Reduced) -> tuple[Queue, ...]:
    return (Queue(SUMS, ISSUE, after=(TILES,)),)


def _everywhere(reduced: Reduced, rank: int, piece: int, own: Chunk) -> Chunk:
    """The own tiles of a piece, whose sums every rank gets in the same place."""
    signal = reduced.split.signal(rank, piece)
    return replace(
        own,
        copies=tuple(replace(own.region, rank=peer) for peer in reduced.peers(rank)),
        notifies=tuple(Notify(SHARED, one_of, signal) for one_of in range(reduced.size)),
    )


def _moved(reduced: Reduced, rank: int) -> Iterator[Operation]:
    """All sums to `y`; the own ones first, as they are surely there."""
    split = reduced.split
    for owner in (rank, *reversed(reduced.peers(rank))):
        for piece in range(split.pieces):
            if not is_empty(split.piece(owner, piece)):
                move = move_of(reduced, rank, owner, piece, is_here=True)
                yield replace(move, waits=one(SHARED, split.signal(owner, piece)))
