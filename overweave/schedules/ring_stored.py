"""All-reduces round a ring: tiles add one sum each and store it at the next rank (schedules/stored.py).

The tiles of an owner store the whole sum in the own `y` and at every peer, so that both shots leave with the end of a
tile; what remains behind the last one is to move the peers' sums, which by then lie in the own workspace.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from overweave.ir.schedule import Notify, Operation, Queue, SignalPad
from overweave.schedules.communication import (
    ISSUE,
    SUMS,
    TILES,
    Chunk,
    Split,
    is_empty,
    region,
)
from overweave.schedules.reduced import Reduced
from overweave.schedules.stored import Stored, round_a_ring, round_a_ring_pad
from overweave.schedules.two_shot import SHARED, move_of

MOVES = Queue(SUMS, ISSUE, after=(TILES,))


def ring_stored(reduced: Reduced, rank: int) -> Iterator[Operation | Chunk]:
    """The parts go round a ring, the sums to every rank, which moves them. Own ones are in `y` at once; or, where who
    moves them norms them, they come first, as they are surely here."""
    split = reduced.split
    yield from round_a_ring(split, reduced.slots, rank, lambda piece: _everywhere(reduced, rank, piece))
    own = (rank,) if reduced.summing.is_normed else ()
    for owner in (*own, *reversed(reduced.split.peers(rank))):
        for piece in range(split.pieces):
            if not is_empty(split.piece(owner, piece)):
                move = move_of(reduced, rank, owner, piece)
                yield replace(move, waits=()) if owner == rank else move


def ring_stored_pads(split: Split) -> tuple[SignalPad, ...]:
    return round_a_ring_pad(split), _shared_pad(split)


def ring_stored_queues(_: Reduced) -> tuple[Queue, ...]:
    return (MOVES,)


def _shared_pad(split: Split) -> SignalPad:
    """For each piece of all, the tiles of its owner."""
    return SignalPad(SHARED, split.world_size * split.pieces)


def _everywhere(reduced: Reduced, rank: int, piece: int) -> Stored:
    """The sum of an own piece at every rank, in the same place of the workspace, or, here, of `y`."""
    rows, signal = reduced.split.piece(rank, piece), reduced.split.signal(rank, piece)
    return Stored(
        region(reduced.total if reduced.summing.is_normed else reduced.y, rank, rows),
        tuple(region(reduced.total, peer, rows) for peer in reduced.split.peers(rank)),
        tuple(Notify(SHARED, peer, signal) for peer in reduced.split.peers(rank)),
    )
