"""Reduce-scatter round a ring: each piece travels from its owner's successor to the owner, and every rank on the way
adds its own partial. Sums are passed on while the next ones are computed; each hop's is rounded, the owner's partial
comes last.

SOURCE: the ring of the libraries' own collectives (NCCL).
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.schedule import Copy, Notify, Operation, Put
from overweave.schedules.communication import ARRIVED, COMPUTED, COPIES, Chunk, is_empty, one, region
from overweave.schedules.scattered import Scatter


def fused_ring(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    """The tiles of one kernel add what arrived."""
    split = scatter.split
    for step in range(1, split.world_size + 1):
        for piece in range(split.pieces):
            yield from _fused_hop(scatter, rank, step, piece)


def _fused_hop(scatter: Scatter, rank: int, step: int, piece: int) -> Iterator[Operation | Chunk]:
    """Tiles add what arrived from the previous rank, if any did, and what they store is passed on to the next one.

    They wait for it late: it was computed there one step ago, and travels while they multiply. An empty piece is passed
    on as it is.
    """
    split = scatter.split
    owner = (rank - step) % split.world_size
    signal, rows, ends = split.signal(owner, piece), split.piece(owner, piece), step == split.world_size
    arrived = () if step == 1 else one(ARRIVED, signal)
    slot, name = scatter.slot_rows(owner, owner, piece), f"{rank}-{owner}.{piece}"
    if not is_empty(rows):
        out = region(scatter.y, rank, scatter.y_rows(rank, piece)) if ends else region(scatter.partial, rank, rows)
        yield Chunk(
            name=f"multiply.{name}",
            rank=rank,
            rows=rows,
            region=out,
            notifies=() if ends else (Notify(COMPUTED, rank, signal),),
            addends=(region(scatter.slots, rank, slot),) if arrived else (),
            place=len(arrived),
            late_waits=arrived,
        )
    elif ends:
        yield Copy(name=f"idle.{name}", rank=rank, queue=COPIES, waits=arrived, sources=(), destinations=())
    if not ends:
        peer = (rank + 1) % split.world_size
        yield Put(
            name=f"pass.{name}",
            rank=rank,
            queue=COPIES,
            waits=arrived if is_empty(rows) else one(COMPUTED, signal),
            notifies=(Notify(ARRIVED, peer, signal),),
            sources=(region(scatter.partial, rank, rows),),
            destinations=(region(scatter.slots, peer, slot),),
        )
