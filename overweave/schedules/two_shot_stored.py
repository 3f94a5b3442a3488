"""All-reduces whose tiles store their parts at a peer (schedules/stored.py), and whose own tiles make the whole sums.

Peers get these from their owner by copy engine, right in the caller's `y`, and only own ones are moved there. Or the
tiles of a ring, which add one sum each, store it in the own `y` and at every peer, so that both shots leave with the
end of a tile; what remains behind the last one is to move the peers' sums, which by then lie in the own workspace. Sums
of several addends are stored from registers, for which peers are too far: MEASURED: 1,040 us for 323 (four H200s, the
geometric mean of 16 layers of 1,024 to 8,192 rows, 2026-11-22).
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from overweave.ir.schedule import Notify, Operation, Queue, SignalPad
from overweave.schedules.communication import (
    COMPLETE,
    ISSUE,
    SUMMED,
    SUMS,
    TELLERS,
    TILES,
    Chunk,
    Split,
    is_empty,
    region,
)
from overweave.schedules.reduced import Reduced
from overweave.schedules.stored import Stored, round_a_ring, round_a_ring_pad, to_owners, to_owners_pad
from overweave.schedules.two_shot import SHARED, got, move_of, tell

MOVES = Queue(SUMS, ISSUE, after=(TILES,))


def two_shot_stored(reduced: Reduced, rank: int) -> Iterator[Operation | Chunk]:
    """The parts go straight to their owners, the sums are told to the peers, whose ones are got meanwhile."""
    split = reduced.split
    yield from to_owners(split, reduced.slots, rank, lambda piece: _kept(reduced, rank, piece))
    for piece in range(split.pieces):
        if not is_empty(split.piece(rank, piece)):
            yield tell(reduced, rank, piece)
            yield move_of(reduced, rank, rank, piece)
        yield from got(reduced, rank, piece)


def ring_stored(reduced: Reduced, rank: int) -> Iterator[Operation | Chunk]:
    """The parts go round a ring, the sums to every rank, which moves them. Own ones are in `y` at once; or, where who
    moves them norms them, they come first, as they are surely here."""
    split = reduced.split
    yield from round_a_ring(split, reduced.slots, rank, lambda piece: _everywhere(reduced, rank, piece))
    own = (rank,) if reduced.summing.is_normed else ()
    for owner in (*own, *reversed(reduced.split.peers(rank))):
        for piece in range(split.pieces):
            if not is_empty(split.piece(owner, piece)):
                move = move_of(reduced, rank, owner, piece, is_here=True, by=SHARED)
                yield replace(move, waits=()) if owner == rank else move


def two_shot_stored_pads(split: Split) -> tuple[SignalPad, ...]:
    return to_owners_pad(split), SignalPad(SUMMED, split.pieces), _shared_pad(split)


def ring_stored_pads(split: Split) -> tuple[SignalPad, ...]:
    return round_a_ring_pad(split), _shared_pad(split)


def two_shot_stored_queues(reduced: Reduced) -> tuple[Queue, ...]:
    return *reduced.split.copy_queues(), Queue(TELLERS, COMPLETE), MOVES


def ring_stored_queues(_: Reduced) -> tuple[Queue, ...]:
    return (MOVES,)


def _shared_pad(split: Split) -> SignalPad:
    """For each piece of all, the tiles of its owner."""
    return SignalPad(SHARED, split.world_size * split.pieces)


def _kept(reduced: Reduced, rank: int, piece: int) -> Stored:
    """The sum of an own piece."""
    return Stored(region(reduced.total, rank, reduced.split.piece(rank, piece)), (), (Notify(SUMMED, rank, piece),))


def _everywhere(reduced: Reduced, rank: int, piece: int) -> Stored:
    """The sum of an own piece at every rank, in the same place of the workspace, or, here, of `y`."""
    rows, signal = reduced.split.piece(rank, piece), reduced.split.signal(rank, piece)
    return Stored(
        region(reduced.total if reduced.summing.is_normed else reduced.y, rank, rows),
        tuple(region(reduced.total, peer, rows) for peer in reduced.split.peers(rank)),
        tuple(Notify(SHARED, peer, signal) for peer in reduced.split.peers(rank)),
    )
