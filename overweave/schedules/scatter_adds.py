"""Reduce-scatter by remote adds: partials are added in fp32 where their owner clears a shard for them, as they come.

The named exception to what every other plan promises: nobody says whose part is added first, so the last bits may
differ from call to call. One slot of fp32 stands for a slot of each source, and twice the bytes travel.
SOURCE: Flux (arXiv 2406.06858) 4.1, whose tiles add at their owner where GPUs reach each other's memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.schedule import Clear, Copy, Notify, Operation, Reduce, ReducePut, Wait
from overweave.schedules.communication import (
    ARRIVED,
    COMPUTED,
    MAIN,
    READY,
    SUMS,
    Chunk,
    is_empty,
    one,
    region,
    shifted,
)
from overweave.schedules.scattered import FINISHED, Scatter


def remote_add(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    """The owner clears and tells everybody; a kernel adds each piece there as its tiles are stored; the owner adds its
    own partial when all have."""
    split = scatter.split
    peers = split.world_size - 1
    yield _clear(scatter, rank)
    for step, piece in split.steps():
        peer = split.peer(rank, step)
        computed = list(scatter.chunk(rank, peer, piece, signals=True))
        yield from computed
        rows = split.piece(peer, piece)
        yield ReducePut(
            name=f"add.{rank}-{peer}.{piece}",
            rank=rank,
            queue=split.copy_queue(step),
            waits=(
                *(one(COMPUTED, split.signal(peer, piece)) if computed else ()),
                *one(READY, split.place(peer, rank)),
            ),
            notifies=(Notify(ARRIVED, peer, piece * peers + split.place(rank, peer)),),
            sources=(region(scatter.partial, rank, rows),),
            destinations=(region(scatter.slots, peer, shifted(rows, -split.shard(peer)[0])),),
            tiles=split.put_tiles(),
            unordered=True,
        )
    yield from _own(scatter, rank)


def _clear(scatter: Scatter, rank: int) -> Clear:
    split = scatter.split
    lo, hi = split.shard(rank)
    return Clear(
        name=f"clear.{rank}",
        rank=rank,
        queue=MAIN,
        notifies=tuple(Notify(READY, peer, split.place(rank, peer)) for peer in split.peers(rank)),
        destinations=(region(scatter.slots, rank, (0, hi - lo)),) if lo < hi else (),
    )


def _own(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    split = scatter.split
    rows, peers = split.shard(rank), split.world_size - 1
    arrived = Wait(ARRIVED, (0, split.pieces * peers), 1)
    if is_empty(rows):
        yield Copy(
            name=f"idle.{rank}", rank=rank, queue=split.copy_queue(peers), waits=(arrived,), sources=(), destinations=()
        )
        return
    own, size = region(scatter.partial, rank, rows), rows[1] - rows[0]
    yield Chunk(name=f"multiply.{rank}.own", rank=rank, rows=rows, region=own, notifies=(Notify(FINISHED, rank, 0),))
    yield Reduce(
        name=f"sum.{rank}",
        rank=rank,
        queue=SUMS,
        waits=(arrived, *one(FINISHED, 0)),
        operands=(region(scatter.slots, rank, (0, size)), own),
        out=region(scatter.y, rank, (0, size)),
    )
