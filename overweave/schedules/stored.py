"""The first shot of a reduction whose tiles store straight at a peer: what leaves with each tile's end, without a copy.

Either each part goes to its owner, whose own tiles, the last, add all of them in rank order; or it goes round a ring,
and each rank's tiles add one sum: its previous rank's, which the Hopper kernel loads while it multiplies.
SOURCE: Flux (arXiv 2406.06858) 4.1, a matmul whose epilogue writes at the rank that a tile belongs to; the ring of the
libraries' own collectives (NCCL).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from overweave.ir.schedule import Buffer, Notify, Region, SignalPad
from overweave.schedules.communication import ARRIVED, Chunk, Split, is_empty, one, region


class Stored(NamedTuple):
    """Where the tiles of a piece leave what they made, and whom they tell."""

    region: Region
    copies: tuple[Region, ...] = ()
    notifies: tuple[Notify, ...] = ()


Wholes = Callable[[int], Stored]  # of each own piece, whose sum is whole then


def to_owners(split: Split, slots: Buffer, rank: int, wholes: Wholes) -> Iterator[Chunk]:
    """The peers' parts, then the own ones. One signal for each own piece counts the tiles of all peers."""
    for step, piece in split.steps():
        owner = split.peer(rank, step)
        rows = split.piece(owner, piece)
        if not is_empty(rows):
            yield Chunk(
                name=f"store.{rank}-{owner}.{piece}",
                rank=rank,
                rows=rows,
                region=region(slots, owner, split.in_slot(owner, rank, rows)),
                notifies=(Notify(ARRIVED, owner, piece),),
            )
    sources = [source for source in range(split.world_size) if source != rank]
    for piece in range(split.pieces):
        rows = split.piece(rank, piece)
        if not is_empty(rows):
            whole = wholes(piece)
            yield Chunk(
                name=f"multiply.{rank}.own.{piece}",
                rank=rank,
                rows=rows,
                region=whole.region,
                copies=whole.copies,
                notifies=whole.notifies,
                addends=tuple(region(slots, rank, split.in_slot(rank, source, rows)) for source in sources),
                place=rank,
                late_waits=one(ARRIVED, piece),
            )


def round_a_ring(split: Split, slots: Buffer, rank: int, wholes: Wholes) -> Iterator[Chunk]:
    """As fused_ring (schedules/scatter_rings.py), each tile storing at the next rank what it made of the last one's.

    Each hop's sum is rounded, the owner's partial comes last.
    """
    following = (rank + 1) % split.world_size
    for step in range(1, split.world_size + 1):
        owner, starts, ends = (rank - step) % split.world_size, step == 1, step == split.world_size
        for piece in range(split.pieces):
            rows, signal = split.piece(owner, piece), split.signal(owner, piece)
            if is_empty(rows):
                continue
            slot = split.in_slot(owner, owner, rows)
            passed_on = Stored(region(slots, following, slot), (), (Notify(ARRIVED, following, signal),))
            stored = wholes(piece) if ends else passed_on
            yield Chunk(
                name=f"pass.{rank}-{owner}.{piece}",
                rank=rank,
                rows=rows,
                region=stored.region,
                copies=stored.copies,
                notifies=stored.notifies,
                addends=() if starts else (region(slots, rank, slot),),
                place=0 if starts else 1,
                late_waits=() if starts else one(ARRIVED, signal),
            )


def to_owners_pad(split: Split) -> SignalPad:
    """For each own piece."""
    return SignalPad(ARRIVED, split.pieces)


def round_a_ring_pad(split: Split) -> SignalPad:
    """For each piece of all."""
    return SignalPad(ARRIVED, split.world_size * split.pieces)
