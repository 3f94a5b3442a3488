"""Two-shot all-reduce: each rank sums its shard of all partials, and its peers get that sum, piece by piece.

Finished parts are put to their owners while later tiles are computed, own rows last; so that the link is busy from the
first part on.
SOURCE: the two-shot all-reduce of torch's symmetric memory; own rows last and rotation as in Flux (arXiv 2406.06858).
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.schedule import Operation, Put, Queue, Reduce
from overweave.schedules.communication import ISSUE, SUMS, Chunk, is_empty, region
from overweave.schedules.families.reduced import Reduced

SHARED = "shared"  # pad of packed messages: a summed piece of a peer is here


def two_shot(reduced: Reduced, rank: int) -> Iterator[Operation | Chunk]:
    """The peers' parts, piece by piece; then the own ones, to which the peers' parts meanwhile travel.

    All first shots stand before the second ones: a sum needs every peer's first shot of its piece.
    """
    split, peers, is_by_tiles = reduced.split, reduced.split.peers(rank), reduced.summing.sums == "epilogue"
    pieces = [
        [owner for owner in range(reduced.size) if not is_empty(split.piece(owner, p))] for p in range(split.pieces)
    ]
    for piece, owners in enumerate(pieces):
        yield from (_multiplied(reduced, rank, peer, piece) for peer in peers if peer in owners)
    for piece, owners in enumerate(pieces):
        if rank in owners and not is_by_tiles:
            yield _multiplied(reduced, rank, rank, piece)
    for piece, owners in enumerate(pieces):
        for step, peer in enumerate(peers, 1):
            if peer in owners:
                yield _scattered(reduced, (rank, peer), step, piece)
    for piece, owners in enumerate(pieces):
        if rank in owners:
            yield _own_tiles(reduced, rank, piece) if is_by_tiles else _sum(reduced, rank, piece)
    for piece, owners in enumerate(pieces):
        if rank in owners:
            yield from _shared(reduced, rank, piece)
            yield move_of(reduced, rank, rank, piece)
        yield from (_received(reduced, rank, owner, piece) for owner in reversed(peers) if owner in owners)


def two_shot_queues(reduced: Reduced) -> tuple[Queue, ...]:
    return (*reduced.split.copy_queues(), Queue(SUMS, ISSUE))


def _multiplied(reduced: Reduced, rank: int, owner: int, piece: int) -> Chunk:
    """An owner's piece of the own partial."""
    rows = reduced.split.piece(owner, piece)
    part = region(reduced.partial, rank, rows)
    return Chunk(name=f"multiply.{rank}-{owner}.{piece}", rank=rank, rows=rows, region=part)


def _scattered(reduced: Reduced, ranks: tuple[int, int], step: int, piece: int) -> Put:
    """ranks: from one to the owner, who is so many steps further."""
    rank, owner = ranks
    rows = reduced.split.piece(owner, piece)
    return Put(
        name=f"scatter.{rank}-{owner}.{piece}",
        rank=rank,
        queue=reduced.split.copy_queue(step),
        sources=(region(reduced.partial, rank, rows),),
        destinations=(reduced.in_slot(owner, rank, rows),),
    )


def _own_tiles(reduced: Reduced, rank: int, piece: int) -> Chunk:
    """An own piece whose tiles add what the peers sent for it, in rank order."""
    rows = reduced.split.piece(rank, piece)
    peers = (source for source in range(reduced.size) if source != rank)
    return Chunk(
        name=f"multiply.{rank}-{rank}.{piece}",
        rank=rank,
        rows=rows,
        region=region(reduced.total, rank, rows),
        addends=tuple(reduced.in_slot(rank, source, rows) for source in peers),
        place=rank,
    )


def _sum(reduced: Reduced, rank: int, piece: int) -> Reduce:
    """The ordered sum of an own piece."""
    rows = reduced.split.piece(rank, piece)
    own = region(reduced.partial, rank, rows)
    return Reduce(
        name=f"sum.{rank}.{piece}",
        rank=rank,
        queue=SUMS,
        operands=tuple(
            own if source == rank else reduced.in_slot(rank, source, rows) for source in range(reduced.size)
        ),
        out=region(reduced.total, rank, rows),
        tiles=reduced.sum_tiles(rows),
    )


def _shared(reduced: Reduced, rank: int, piece: int) -> Iterator[Put]:
    """The sum of an own piece to all peers."""
    rows = reduced.split.piece(rank, piece)
    for step, peer in enumerate(reduced.split.peers(rank), 1):
        yield Put(
            name=f"share.{rank}-{peer}.{piece}",
            rank=rank,
            queue=reduced.split.copy_queue(step),
            sources=(region(reduced.total, rank, rows),),
            destinations=(region(reduced.total, peer, rows),),
        )


def _received(reduced: Reduced, rank: int, owner: int, piece: int) -> Reduce:
    """A peer's sum, from where it was put. A rank without a shard waits for its own part of that sum too, so that its
    moves are not launched before its tiles run.
    """
    move, own = move_of(reduced, rank, owner, piece), region(reduced.partial, rank, reduced.split.piece(owner, piece))
    if is_empty(reduced.split.shard(rank)):
        reduced.behind[move.name] = (own,)
    return move


def move_of(reduced: Reduced, rank: int, owner: int, piece: int) -> Reduce:
    """An owner's sum of a piece, from the own workspace to the caller's `y`."""
    rows = reduced.split.piece(owner, piece)
    return Reduce(
        name=f"move.{rank}-{owner}.{piece}",
        rank=rank,
        queue=SUMS,
        operands=(region(reduced.total, rank, rows),),
        out=region(reduced.y, rank, rows),
    )
