"""Reduce-scatter by sums that pull: tiles store at home, and each owner's kernel reads its rows where they lie.

Nothing is pushed, and no slots are needed: as soon as the tiles of a piece of a peer's rows are stored, its owner is
told so. A stream does that, which waits and writes a signal; sums of the owner's parts run beside its last tiles.
SOURCE: Flux (arXiv 2406.06858) 4.2: where tiles store locally, others load ready remote tiles and reduce them.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.schedule import Copy, Notify, Operation, Range, Reduce
from overweave.schedules.communication import (
    ARRIVED,
    COMPUTED,
    TELLERS,
    Chunk,
    is_empty,
    one,
    region,
    shifted,
)
from overweave.schedules.scattered import FINISHED, Scatter


def scatter_pull(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    """Peers' rows, each piece told to its owner; then the own ones, in parts that are summed in rank order."""
    split = scatter.split
    for step, piece in split.steps():
        peer = split.peer(rank, step)
        yield from scatter.chunk(rank, peer, piece, signals=True)
        yield _tell(scatter, rank, peer, piece)
    parts = scatter.own_parts(rank)
    for index, rows in enumerate(parts):
        finished, part = (Notify(FINISHED, rank, index),), region(scatter.partial, rank, rows)
        yield Chunk(name=f"multiply.{rank}.own.{index}", rank=rank, rows=rows, region=part, notifies=finished)
    for index, rows in enumerate(parts):
        yield _sum(scatter, rank, index, rows)
    if not parts:
        yield scatter.idle(rank, TELLERS)


def _tell(scatter: Scatter, rank: int, peer: int, piece: int) -> Copy:
    """Tells an owner that it may read a piece of its rows here; of an empty one too, for owners wait for ranges."""
    split = scatter.split
    has_rows = not is_empty(split.piece(peer, piece))
    return Copy(
        name=f"tell.{rank}-{peer}.{piece}",
        rank=rank,
        queue=TELLERS,
        waits=one(COMPUTED, split.signal(peer, piece)) if has_rows else (),
        notifies=(Notify(ARRIVED, peer, piece * (split.world_size - 1) + split.place(rank, peer)),),
        sources=(),
        destinations=(),
    )


def _sum(scatter: Scatter, rank: int, index: int, rows: Range) -> Reduce:
    """The ordered sum of a part of the own shard, read where each rank has left its partial of it."""
    split = scatter.split
    return Reduce(
        name=f"sum.{rank}.{index}",
        rank=rank,
        queue=scatter.sums,
        waits=(scatter.arrived(rank, rows), *one(FINISHED, index)),
        operands=tuple(region(scatter.partial, source, rows) for source in range(split.world_size)),
        out=region(scatter.y, rank, shifted(rows, -split.shard(rank)[0])),
    )
