"""Two-shot all-reduce: each rank sums its shard of all partials, and its peers get that sum, piece by piece.

two_shot: finished parts are put to their owners while later tiles are computed, own rows last; so that the link is busy
from the first part on. two_shot_pull: after one library matmul, one kernel reads what it needs from peers, with no
copies. What a kernel sums for peers to read, its own tiles announce there: no stream has to look and to write.
SOURCE: the two-shot all-reduce of torch's symmetric memory; own rows last and rotation as in Flux (arXiv 2406.06858).
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from overweave.ir.schedule import Copy, Get, Notify, Operation, Put, Queue, Range, Reduce, Region, SignalPad, Wait
from overweave.schedules.communication import (
    ARRIVED,
    COMPLETE,
    COMPUTED,
    ISSUE,
    READY,
    SUMMED,
    SUMS,
    TELLERS,
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
            if reduced.summing.sharing == "put":
                yield from _put(reduced, rank, piece)
            elif reduced.summing.sums == "epilogue":
                yield tell(reduced, rank, piece)
            yield move_of(reduced, rank, rank, piece, by=SHARED if _sums_tell(reduced) else SUMMED)
        yield from _received(reduced, rank, piece)


def two_shot_pads(split: Split) -> tuple[SignalPad, ...]:
    every, peers = split.world_size * split.pieces, split.world_size - 1
    arrived, summed = SignalPad(ARRIVED, peers * split.pieces), SignalPad(SUMMED, split.pieces)
    return SignalPad(COMPUTED, every), arrived, summed, SignalPad(SHARED, every)


def two_shot_queues(reduced: Reduced) -> tuple[Queue, ...]:
    told = (Queue(TELLERS, COMPLETE),) if reduced.summing.sharing == "get" and not _sums_tell(reduced) else ()
    return (*reduced.split.copy_queues(), *told, Queue(SUMS, ISSUE))


def _sums_tell(reduced: Reduced) -> bool:
    """Whether the kernel that sums tells the peers, who get its sums."""
    return (reduced.summing.sums, reduced.summing.sharing) == ("kernel", "get")


def two_shot_pull(reduced: Reduced, rank: int) -> Iterator[Operation | Chunk]:
    """One matmul; sums read the peers' partials of the own shard; moves read the peers' sums."""
    split = reduced.split
    yield reduced.multiplied(rank, reduced.partial, reduced.tell_ready(rank))
    ready = Wait(READY, (0, reduced.size - 1), 1)
    pieces = [piece for piece in range(split.pieces) if not is_empty(split.piece(rank, piece))]
    for piece in pieces:
        rows = split.piece(rank, piece)
        operands = tuple(region(reduced.partial, source, rows) for source in range(reduced.size))
        yield _sum_of(reduced, (rank, piece), operands, (ready,), _everyone(reduced, rank, piece))
    for piece in range(split.pieces):
        if piece in pieces:
            yield move_of(reduced, rank, rank, piece, by=SHARED)
        for owner in reduced.split.peers(rank):
            if not is_empty(split.piece(owner, piece)):
                move = move_of(reduced, rank, owner, piece)
                # A rank without rows to sum takes note here that its peers were ready.
                yield move if pieces else replace(move, waits=(ready, *move.waits))


def two_shot_pull_pads(split: Split) -> tuple[SignalPad, ...]:
    return SignalPad(READY, split.world_size - 1), SignalPad(SHARED, split.world_size * split.pieces)


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
    operands = tuple(own if source == rank else reduced.in_slot(rank, source, rows) for source in range(reduced.size))
    computed = one(COMPUTED, reduced.split.signal(rank, piece))
    told = _everyone(reduced, rank, piece) if _sums_tell(reduced) else (Notify(SUMMED, rank, piece),)
    return _sum_of(reduced, (rank, piece), operands, (_arrived(reduced, piece), *computed), told)


def _everyone(reduced: Reduced, rank: int, piece: int) -> tuple[Notify, ...]:
    """Tells all ranks, the own one too, that the sum of an own piece may be read."""
    signal = reduced.split.signal(rank, piece)
    return tuple(Notify(SHARED, each, signal) for each in (rank, *reduced.split.peers(rank)))


def _sum_of(
    reduced: Reduced,
    which: tuple[int, int],
    operands: tuple[Region, ...],
    waits: tuple[Wait, ...],
    notifies: tuple[Notify, ...],
) -> Reduce:
    """which: the rank and the piece of its shard."""
    rank, piece = which
    rows: Range = reduced.split.piece(rank, piece)
    return Reduce(
        name=f"sum.{rank}.{piece}",
        rank=rank,
        queue=SUMS,
        waits=waits,
        notifies=notifies,
        operands=operands,
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


def tell(reduced: Reduced, rank: int, piece: int) -> Copy:
    """Tells all peers that tiles have summed an own piece, which may be read; first the one that gets it first."""
    signal = reduced.split.signal(rank, piece)
    return Copy(
        name=f"tell.{rank}.{piece}",
        rank=rank,
        queue=TELLERS,
        waits=one(SUMMED, piece),
        notifies=tuple(Notify(SHARED, peer, signal) for peer in reversed(reduced.split.peers(rank))),
        sources=(),
        destinations=(),
    )


def _received(reduced: Reduced, rank: int, piece: int) -> Iterator[Operation]:
    """The peers' sums of a piece to `y`: got there, or moved in the order in which they arrive."""
    if reduced.summing.sharing == "get":
        yield from got(reduced, rank, piece)
        return
    for owner in reversed(reduced.split.peers(rank)):
        if not is_empty(reduced.split.piece(owner, piece)):
            yield _moved(reduced, rank, owner, piece)


def _moved(reduced: Reduced, rank: int, owner: int, piece: int) -> Reduce:
    """A peer's sum, from where it was put. A rank without a shard waits for its own part of that sum too, so that its
    moves are not launched before its tiles run.
    """
    move = move_of(reduced, rank, owner, piece, is_here=True)
    has_shard = not is_empty(reduced.split.shard(rank))
    own = () if has_shard else one(COMPUTED, reduced.split.signal(owner, piece))
    return replace(move, waits=move.waits + own)


def got(reduced: Reduced, rank: int, piece: int) -> Iterator[Get]:
    """The peers' sums of a piece by copy engine, right into the caller's `y`, the next rank's first."""
    for step, owner in enumerate(reduced.split.peers(rank), 1):
        rows = reduced.split.piece(owner, piece)
        if not is_empty(rows):
            yield Get(
                name=f"get.{rank}-{owner}.{piece}",
                rank=rank,
                queue=reduced.split.copy_queue(step),
                waits=one(SHARED, reduced.split.signal(owner, piece)),
                sources=(region(reduced.total, owner, rows),),
                destinations=(region(reduced.y, rank, rows),),
            )


def move_of(reduced: Reduced, rank: int, owner: int, piece: int, is_here: bool = False, by: str = SUMMED) -> Reduce:
    """An owner's sum of a piece to the caller's `y`: from where it was put, or from where it was summed. by: the pad
    that says so of own sums."""
    rows, split = reduced.split.piece(owner, piece), reduced.split
    return Reduce(
        name=f"move.{rank}-{owner}.{piece}",
        rank=rank,
        queue=SUMS,
        waits=one(SUMMED, piece) if (owner, by) == (rank, SUMMED) else one(SHARED, split.signal(owner, piece)),
        operands=(region(reduced.total, rank if is_here else owner, rows),),
        out=region(reduced.y, rank, rows),
    )
