"""Two-shot all-reduce of packed messages: parts to their owners, who add them, and sums to everybody, by one kernel.

For sizes where one-shot sends too much: a rank sends `2 (W - 1) / W` partials, not `W - 1`. Every rank hears in each
call from every other, so memory is reused by echoes; who owns no rows hears and tells all the same, without data,
because the kernel deals all shards alike to its programs.
SOURCE: the two-shot all-reduce of TensorRT-LLM; flags in the message as in NCCL's LL protocol.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.schedule import Copy, Notify, Operation, Put, Reduce, SignalPad, Wait
from overweave.schedules.communication import ARRIVED, PACKED, SUMMED, Chunk, Split, is_empty, one, region
from overweave.schedules.families.reduced import Reduced
from overweave.schedules.families.two_shot import SHARED


def two_shot_packed(reduced: Reduced, rank: int) -> Iterator[Operation | Chunk]:
    """The whole partial; then, as the kernel goes, parts to owners, the own sum, that to peers, and all in place."""
    yield reduced.multiplied(rank, reduced.partial)
    for owner in reduced.split.peers(rank):
        yield _part(reduced, rank, owner)
    if not is_empty(reduced.split.shard(rank)):
        yield _sum(reduced, rank)
    for peer in reduced.split.peers(rank):
        yield _share(reduced, rank, peer)
    yield _moved(reduced, rank)


def two_shot_packed_pads(split: Split) -> tuple[SignalPad, ...]:
    peers = split.world_size - 1
    return SignalPad(ARRIVED, peers), SignalPad(SUMMED, 1), SignalPad(SHARED, peers)


def _all(reduced: Reduced, pad: str) -> Wait:
    return Wait(pad, (0, reduced.size - 1), 1)


def _part(reduced: Reduced, rank: int, owner: int) -> Put:
    """An owner without rows is told that this rank is here."""
    rows = reduced.split.shard(owner)
    return Put(
        name=f"push.{rank}-{owner}",
        rank=rank,
        queue=PACKED,
        notifies=(Notify(ARRIVED, owner, reduced.split.place(rank, owner)),),
        sources=() if is_empty(rows) else (region(reduced.partial, rank, rows),),
        destinations=() if is_empty(rows) else (reduced.in_slot(owner, rank, rows),),
    )


def _sum(reduced: Reduced, rank: int) -> Reduce:
    """In rank order. It is stored and sent: the kernel keeps it nowhere else."""
    rows = reduced.split.shard(rank)
    own = region(reduced.partial, rank, rows)
    parts = (reduced.in_slot(rank, source, rows) for source in range(reduced.size))
    return Reduce(
        name=f"sum.{rank}",
        rank=rank,
        queue=PACKED,
        waits=(_all(reduced, ARRIVED),),
        notifies=(Notify(SUMMED, rank, 0),),
        operands=tuple(own if source == rank else part for source, part in enumerate(parts)),
        out=region(reduced.total, rank, rows),
    )


def _share(reduced: Reduced, rank: int, peer: int) -> Put:
    """Behind the own sum; without rows, behind the parts that would have been summed."""
    rows = reduced.split.shard(rank)
    return Put(
        name=f"share.{rank}-{peer}",
        rank=rank,
        queue=PACKED,
        waits=(_all(reduced, ARRIVED),) if is_empty(rows) else one(SUMMED, 0),
        notifies=(Notify(SHARED, peer, reduced.split.place(rank, peer)),),
        sources=() if is_empty(rows) else (region(reduced.total, rank, rows),),
        destinations=() if is_empty(rows) else (region(reduced.total, peer, rows),),
    )


def _moved(reduced: Reduced, rank: int) -> Copy:
    """The sums of all, the peers' out of their messages."""
    shards = [reduced.split.shard(owner) for owner in range(reduced.size)]
    held = [rows for rows in shards if not is_empty(rows)]
    own = () if is_empty(reduced.split.shard(rank)) else one(SUMMED, 0)
    return Copy(
        name=f"move.{rank}",
        rank=rank,
        queue=PACKED,
        waits=(_all(reduced, SHARED), *own),
        sources=tuple(region(reduced.total, rank, rows) for rows in held),
        destinations=tuple(region(reduced.y, rank, rows) for rows in held),
    )
