"""All-reduces without copies: tiles store at a peer, and those that make the whole sum, their owner's, at every rank.

Both shots leave with the end of a tile (schedules/stored.py has the first). What remains behind the last one is to move
the sums, which by then lie in the own workspace, to the caller's `y`.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from overweave.ir.schedule import Notify, Operation, Queue, SignalPad
from overweave.schedules.communication import ISSUE, SUMS, TILES, Chunk, Split, is_empty, one, region
from overweave.schedules.reduced import Reduced
from overweave.schedules.stored import Stored, round_a_ring, round_a_ring_pad, to_owners, to_owners_pad
from overweave.schedules.two_shot import SHARED, move_of


def two_shot_stored(reduced: Reduced, rank: int) -> Iterator[Operation | Chunk]:
    """The parts go straight to their owners."""
    yield from to_owners(reduced.split, reduced.slots, rank, lambda piece: _everywhere(reduced, rank, piece))
    yield from _moved(reduced, rank)


def ring_stored(reduced: Reduced, rank: int) -> Iterator[Operation | Chunk]:
    """The parts go round a ring."""
    yield from round_a_ring(reduced.split, reduced.slots, rank, lambda piece: _everywhere(reduced, rank, piece))
    yield from _moved(reduced, rank)


def two_shot_stored_pads(split: Split) -> tuple[SignalPad, ...]:
    return to_owners_pad(split), _shared(split)


def ring_stored_pads(split: Split) -> tuple[SignalPad, ...]:
    return round_a_ring_pad(split), _shared(split)


def stored_queues(reduced: Reduced) -> tuple[Queue, ...]:
    return (Queue(SUMS, ISSUE, after=(TILES,)),)


def _shared(split: Split) -> SignalPad:
    """For each piece of all the tiles of its owner."""
    return SignalPad(SHARED, split.world_size * split.pieces)


def _everywhere(reduced: Reduced, rank: int, piece: int) -> Stored:
    """The sum of an own piece at every rank, in the same place."""
    rows, signal = reduced.split.piece(rank, piece), reduced.split.signal(rank, piece)
    return Stored(
        region(reduced.total, rank, rows),
        tuple(region(reduced.total, peer, rows) for peer in reduced.peers(rank)),
        tuple(Notify(SHARED, each, signal) for each in range(reduced.size)),
    )


def _moved(reduced: Reduced, rank: int) -> Iterator[Operation]:
    """All sums to `y`; the own ones first, as they are surely there."""
    split = reduced.split
    for owner in (rank, *reversed(reduced.peers(rank))):
        for piece in range(split.pieces):
            if not is_empty(split.piece(owner, piece)):
                move = move_of(reduced, rank, owner, piece, is_here=True)
                yield replace(move, waits=one(SHARED, split.signal(owner, piece)))
