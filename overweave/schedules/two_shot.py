"""Two-shot all-reduce: each rank sums its shard of all partials, and its peers get that sum, piece by piece.

Finished parts are put to their owners while later tiles are computed, own rows last; so that the link is busy from the
first part on.
SOURCE: the two-shot all-reduce of torch's symmetric memory; own rows last and rotation as in Flux (arXiv 2406.06858).
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from overweave.ir.schedule import Notify, Operation, Put, Queue, Reduce, SignalPad, Wait
from overweave.schedules.communication import (
    ARRIVED,
    COMPUTED,
    ISSUE,
    SUMMED,
    SUMS,
    Chunk,
    Split,
    is_empty,
    one,
    region,
)
from overweave.schedules.reduced import Reduced

SHARED = "shared"  # pad: a summed piece of a peer is here, or may be got


def two_shot(reduced: Reduced, rank: int) -> Iterator[Operation | Chunk]:
    """The peers' parts, piece by piece; then the own ones, to which the peers' parts meanwhile travel.

    All first shots stand before the second ones: a sum needs every peer's first shot of its piece.
    """
    pieces = [piece for piece in range(reduced.split.pieces) if not is_empty(reduced.split.piece(rank, piece))]
    for piece in range(reduced.split.pieces):
        for peer in reduced.split.peers(rank):
            yield from _multiplied(reduced, rank, peer, piece)
    if reduced.summing.sums == "kernel":
        for piece in pieces:
            yield from _multiplied(reduced, rank, rank, piece)
    for piece in range(reduced.split.pieces):
        yield from _scattered(reduced, rank, piece)
    for piece in pieces:
        yield _own_tiles(reduced, rank, piece) if reduced.summing.sums == "epilogue" else _sum(reduced, rank, piece)
    for piece in range(reduced.split.pieces):
        if piece in pieces:
            yield from _put(reduced, rank, piece)
            yield move_of(reduced, rank, rank, piece, by=SUMMED)
        yield from _received(reduced, rank, piece)


def two_shot_pads(split: Split) -> tuple[SignalPad, ...]:
    every, peers = split.world_size * split.pieces, split.world_size - 1
    arrived, summed = SignalPad(ARRIVED, peers * split.pieces), SignalPad(SUMMED, split.pieces)
    return SignalPad(COMPUTED, every), arrived, summed, SignalPad(SHARED, every)


def two_shot_queues(reduced: Reduced) -> tuple[Queue, ...]:
    return (*reduced.split.copy_queues(), Queue(SUMS, ISSUE))


def _multiplied(reduced: Reduced, rank: int, owner: int, piece: int) -> Iterator[Chunk]:
    """An owner's piece of the own partial, if it has any."""
    rows = reduced.split.piece(owner, piece)
    if not is_empty(rows):
        yield Chunk(
            name=f"multiply.{rank}-{owner}.{piece}",
            rank=rank,
            rows=rows,
            region=region(reduced.partial, rank, rows),
            notifies=(Notify(COMPUTED, rank, reduced.split.signal(owner, piece)),),
        )


def _scattered(reduced: Reduced, rank: int, piece: int) -> Iterator[Put]:
    """The peers' rows of a piece to their owners."""
    split = reduced.split
    for step, peer in enumerate(reduced.split.peers(rank), 1):
        rows = split.piece(peer, piece)
        if not is_empty(rows):
            yield Put(
                name=f"scatter.{rank}-{peer}.{piece}",
                rank=rank,
                queue=split.copy_queue(step),
                waits=one(COMPUTED, split.signal(peer, piece)),
                notifies=(Notify(ARRIVED, peer, piece * (reduced.size - 1) + reduced.split.place(rank, peer)),),
                sources=(region(reduced.partial, rank, rows),),
                destinations=(reduced.in_slot(peer, rank, rows),),
            )


def _arrived(reduced: Reduced, piece: int) -> Wait:
    return Wait(ARRIVED, (piece * (reduced.size - 1), (piece + 1) * (reduced.size - 1)), 1)


def _own_tiles(reduced: Reduced, rank: int, piece: int) -> Chunk:
    """An own piece whose tiles add what the peers sent for it, in rank order."""
    rows = reduced.split.piece(rank, piece)
    peers = (source for source in range(reduced.size) if source != rank)
    return Chunk(
        name=f"multiply.{rank}-{rank}.{piece}",
        rank=rank,
        rows=rows,
        region=region(reduced.total, rank, rows),
        notifies=(Notify(SUMMED, rank, piece),),
        addends=tuple(reduced.in_slot(rank, source, rows) for source in peers),
        place=rank,
        late_waits=(_arrived(reduced, piece),),
    )


def _sum(reduced: Reduced, rank: int, piece: int) -> Reduce:
    """The ordered sum of an own piece, once it is computed and the peers' parts are here."""
    rows = reduced.split.piece(rank, piece)
    own = region(reduced.partial, rank, rows)
    return Reduce(
        name=f"sum.{rank}.{piece}",
        rank=rank,
        queue=SUMS,
        waits=(_arrived(reduced, piece), *one(COMPUTED, reduced.split.signal(rank, piece))),
        notifies=(Notify(SUMMED, rank, piece),),
        operands=tuple(
            own if source == rank else reduced.in_slot(rank, source, rows) for source in range(reduced.size)
        ),
        out=region(reduced.total, rank, rows),
        tiles=reduced.sum_tiles(rows),
    )


def _put(reduced: Reduced, rank: int, piece: int) -> Iterator[Put]:
    """The sum of an own piece to all peers: the first copy of a queue waits for it."""
    split = reduced.split
    rows = split.piece(rank, piece)
    queues = [split.copy_queue(step) for step in range(1, reduced.size)]
    for step, peer in enumerate(reduced.split.peers(rank)):
        yield Put(
            name=f"share.{rank}-{peer}.{piece}",
            rank=rank,
            queue=queues[step],
            waits=() if queues[step] in queues[:step] else one(SUMMED, piece),
            notifies=(Notify(SHARED, peer, split.signal(rank, piece)),),
            sources=(region(reduced.total, rank, rows),),
            destinations=(region(reduced.total, peer, rows),),
        )


def _received(reduced: Reduced, rank: int, piece: int) -> Iterator[Operation]:
    """The peers' sums of a piece, moved to `y` in the order in which they arrive."""
    for owner in reversed(reduced.split.peers(rank)):
        if not is_empty(reduced.split.piece(owner, piece)):
            yield _moved(reduced, rank, owner, piece)


def _moved(reduced: Reduced, rank: int, owner: int, piece: int) -> Reduce:
    """A peer's sum, from where it was put. A rank without a shard waits for its own part of that sum too, so that its
    moves are not launched before its tiles run.
    """
    move = move_of(reduced, rank, owner, piece)
    has_shard = not is_empty(reduced.split.shard(rank))
    own = () if has_shard else one(COMPUTED, reduced.split.signal(owner, piece))
    return replace(move, waits=move.waits + own)


def move_of(reduced: Reduced, rank: int, owner: int, piece: int, by: str = SHARED) -> Reduce:
    """An owner's sum of a piece, from the own workspace to the caller's `y`. by: the pad that tells of the sum."""
    rows, split = reduced.split.piece(owner, piece), reduced.split
    return Reduce(
        name=f"move.{rank}-{owner}.{piece}",
        rank=rank,
        queue=SUMS,
        waits=one(SUMMED, piece) if by == SUMMED else one(SHARED, split.signal(owner, piece)),
        operands=(region(reduced.total, rank, rows),),
        out=region(reduced.y, rank, rows),
    )
