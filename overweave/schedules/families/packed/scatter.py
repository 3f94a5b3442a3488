"""Reduce-scatter in packed messages: each part of a partial to its owner, who adds them in rank order, by one kernel.

For sums so small that a call is latencies in a row. Every rank hears in each call from every other, so memory is reused
by echoes; who owns no rows hears all the same, without data.
SOURCE: the first shot of the two-shot all-reduce of TensorRT-LLM; flags in the message as in NCCL's LL protocol.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.schedule import Copy, Notify, Operation, Put, Range, Reduce, SignalPad, Wait
from overweave.schedules.communication import ARRIVED, PACKED, Chunk, Split, is_empty, region
from overweave.schedules.families.scattered import Scatter


def scatter_packed(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    """The whole partial; then, in the order of the kernel, its parts to their owners, and the own sum."""
    split = scatter.split
    if not split.rows:
        return
    whole, size = (0, split.rows), split.world_size
    yield Chunk(name=f"multiply.{rank}", rank=rank, rows=whole, region=region(scatter.partial, rank, whole))
    for step in range(1, size):
        owner = (rank + step) % size
        rows = split.shard(owner)
        yield Put(
            name=f"push.{rank}-{owner}",
            rank=rank,
            queue=PACKED,
            notifies=(Notify(ARRIVED, owner, size - 1 - step),),
            sources=() if is_empty(rows) else (region(scatter.partial, rank, rows),),
            destinations=() if is_empty(rows) else (scatter.slot(owner, rank, rows),),
        )
    yield _sum(scatter, rank, split.shard(rank))


def _sum(scatter: Scatter, rank: int, rows: Range) -> Operation:
    """In rank order; a rank without a shard takes note that its peers were there."""
    size = scatter.split.world_size
    waits = (Wait(ARRIVED, (0, size - 1), 1),)
    if is_empty(rows):
        return Copy(name=f"idle.{rank}", rank=rank, queue=PACKED, waits=waits, sources=(), destinations=())
    own = region(scatter.partial, rank, rows)
    return Reduce(
        name=f"sum.{rank}",
        rank=rank,
        queue=PACKED,
        waits=waits,
        operands=tuple(own if source == rank else scatter.slot(rank, source, rows) for source in range(size)),
        out=scatter.result(rank, rows),
    )


def scatter_packed_pads(split: Split) -> tuple[SignalPad, ...]:
    return (SignalPad(ARRIVED, split.world_size - 1),)
