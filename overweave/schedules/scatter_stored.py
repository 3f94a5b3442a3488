"""Reduce-scatter without copies: tiles store straight at a peer, and nothing follows the last one.

What travels leaves with each tile's end, and is there when the product is done to which it is added. Either each part
goes to its owner, whose own tiles, the last, add all of them in rank order; or it goes round a ring, and each rank's
tiles add one sum: its previous rank's, which the Hopper kernel loads while it multiplies.
SOURCE: Flux (arXiv 2406.06858) 4.1, a matmul whose epilogue writes at the rank that a tile belongs to; the ring of the
libraries' own collectives (NCCL).
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


def ring_stored(scatter: Scatter, rank: int) -> Iterator[Chunk]:
    """As fused_ring (schedules/scatter_rings.py), each tile storing at the next rank what it made of the last one's.

    Each hop's sum is rounded, the owner's partial comes last.
    """
    split = scatter.split
    following = (rank + 1) % split.world_size
    for step in range(1, split.world_size + 1):
        owner, starts, ends = (rank - step) % split.world_size, step == 1, step == split.world_size
        for piece in range(split.pieces):
            rows = split.piece(owner, piece)
            if is_empty(rows):
                continue
            slot, signal = scatter.slot_rows(owner, owner, piece), split.signal(owner, piece)
            passed_on = region(scatter.slots, following, slot)
            yield Chunk(
                name=f"pass.{rank}-{owner}.{piece}",
                rank=rank,
                rows=rows,
                region=region(scatter.y, rank, scatter.y_rows(rank, piece)) if ends else passed_on,
                notifies=() if ends else (Notify(ARRIVED, following, signal),),
                addends=() if starts else (region(scatter.slots, rank, slot),),
                place=0 if starts else 1,
                late_waits=() if starts else one(ARRIVED, signal),
            )


def ring_stored_pads(split: Split) -> tuple[SignalPad, ...]:
    return (SignalPad(ARRIVED, split.world_size * split.pieces),)


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
