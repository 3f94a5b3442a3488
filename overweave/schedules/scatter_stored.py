"""Reduce-scatter without copies: tiles store straight into slots of their owner, whose own tiles, the last, add them.

No partial stands in between, and nothing follows the last tile: what travels leaves with each tile's end, and the own
shard's tiles find it there when their products are done.
SOURCE: Flux (arXiv 2406.06858) 4.1, a matmul whose epilogue writes at the rank that a tile belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.schedule import Notify, SignalPad
from overweave.schedules.communication import ARRIVED, Chunk, Split, is_empty, one, region, shifted
from overweave.schedules.scattered import Scatter


def scatter_stored(scatter: Scatter, rank: int) -> Iterator[Chunk]:
    """One signal for each own piece counts the tiles of all peers."""
    split = scatter.split
    for step, piece in split.steps():
        peer = split.peer(rank, step)
        rows = split.piece(peer, piece)
        if not is_empty(rows):
            yield Chunk(
                name=f"store.{rank}-{peer}.{piece}",
                rank=rank,
                rows=rows,
                region=region(scatter.slots, peer, scatter.slot_rows(rank, peer, piece)),
                notifies=(Notify(ARRIVED, peer, piece),),
            )
    for piece in range(split.pieces):
        if not is_empty(split.piece(rank, piece)):
            yield _own_tiles(scatter, rank, piece)


def scatter_stored_pads(split: Split) -> tuple[SignalPad, ...]:
    return (SignalPad(ARRIVED, split.pieces),)


def _own_tiles(scatter: Scatter, rank: int, piece: int) -> Chunk:
    split = scatter.split
    rows = split.piece(rank, piece)
    begin = shifted(rows, -split.shard(rank)[0])
    sources = (source for source in range(split.world_size) if source != rank)
    return Chunk(
        name=f"multiply.{rank}.own.{piece}",
        rank=rank,
        rows=rows,
        region=region(scatter.y, rank, begin),
        addends=tuple(region(scatter.slots, rank, shifted(begin, source * split.shard_size)) for source in sources),
        place=rank,
        late_waits=one(ARRIVED, piece),
    )
