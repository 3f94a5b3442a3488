"""Reduce-scatter by remote adds: partials are added in fp32 where their owner clears a shard for them, as they come.

The named exception to what every other plan promises: nobody says whose part is added first, so the last bits may
differ from call to call. One slot of fp32 stands for a slot of each source, and twice the bytes travel.
SOURCE: Flux (arXiv 2406.06858) 4.1, whose tiles add at their owner where GPUs reach each other's memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.schedule import Clear, Operation, ReducePut
from overweave.schedules.communication import MAIN, Chunk, is_empty, region
from overweave.schedules.families.scattered import Scatter


def remote_add(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    """The owner clears; a kernel adds each piece there as its tiles are stored; the owner adds its own partial last."""
    split, own = scatter.split, scatter.split.shard(rank)
    if not is_empty(own):
        yield Clear(name=f"clear.{rank}", rank=rank, queue=MAIN, destinations=(scatter.slot(rank, 0, own),))
    for step, piece in split.steps():
        peer = split.peer(rank, step)
        rows = split.piece(peer, piece)
        if not is_empty(rows):
            part = scatter.part(rank, peer, piece)
            yield part
            yield ReducePut(
                name=f"add.{rank}-{peer}.{piece}",
                rank=rank,
                queue=split.copy_queue(step),
                sources=(part.region,),
                destinations=(scatter.slot(peer, 0, rows),),
                tiles=split.put_tiles(),
                unordered=True,
            )
    if not is_empty(own):
        partial = region(scatter.partial, rank, own)
        yield Chunk(name=f"multiply.{rank}.own", rank=rank, rows=own, region=partial)
        yield scatter.sum(rank, 0, own, (scatter.slot(rank, 0, own), partial))
