"""Reduce-scatter round a ring: each piece travels from its owner's successor to the owner, and every rank on the way
adds its own partial. Each hop's sum is rounded, the owner's partial comes last.

The tiles of one kernel add what arrived. Of a sum that a copy brings they wait late: it was computed one step ago, and
travels while they multiply. Or tiles store at the next rank themselves, and load what arrived while they multiply.
SOURCE: the ring of the libraries' own collectives (NCCL); Flux (arXiv 2406.06858) 4.1 for stores at a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from overweave.ir.schedule import Buffer, Operation, Put, Region
from overweave.schedules.communication import COPIES, Chunk, Split, is_empty, region
from overweave.schedules.families.scattered import Scatter


class Stored(NamedTuple):
    """Where the tiles of a piece leave what they made: in a region, and in copies at other ranks."""

    region: Region
    copies: tuple[Region, ...] = ()


class _Hop(NamedTuple):
    owner: int
    piece: int
    starts: bool
    ends: bool


def _hops(split: Split, rank: int) -> Iterator[_Hop]:
    """Of a rank, those of pieces that have rows: the own ones end here, those of the rank before it start."""
    for step in range(1, split.world_size + 1):
        owner = (rank - step) % split.world_size
        for piece in range(split.pieces):
            if not is_empty(split.piece(owner, piece)):
                yield _Hop(owner, piece, step == 1, step == split.world_size)


def fused_ring(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    """A copy engine carries what tiles store here to the next rank."""
    split, following = scatter.split, (rank + 1) % scatter.split.world_size
    for hop in _hops(split, rank):
        rows = split.piece(hop.owner, hop.piece)
        slot, name = split.in_slot(hop.owner, hop.owner, rows), f"{rank}-{hop.owner}.{hop.piece}"
        out = scatter.result(rank, rows) if hop.ends else region(scatter.partial, rank, rows)
        addends = () if hop.starts else (region(scatter.slots, rank, slot),)
        yield Chunk(name=f"multiply.{name}", rank=rank, rows=rows, region=out, addends=addends, place=len(addends))
        if not hop.ends:
            to = region(scatter.slots, following, slot)
            yield Put(name=f"pass.{name}", rank=rank, queue=COPIES, sources=(out,), destinations=(to,))


def stored_round(split: Split, slots: Buffer, rank: int, wholes: Callable[[int], Stored]) -> Iterator[Chunk]:
    """Tiles store at the next rank; wholes: where they store the whole sum of an own piece."""
    following = (rank + 1) % split.world_size
    for hop in _hops(split, rank):
        rows = split.piece(hop.owner, hop.piece)
        slot = split.in_slot(hop.owner, hop.owner, rows)
        stored = wholes(hop.piece) if hop.ends else Stored(region(slots, following, slot))
        addends = () if hop.starts else (region(slots, rank, slot),)
        yield Chunk(
            name=f"pass.{rank}-{hop.owner}.{hop.piece}",
            rank=rank,
            rows=rows,
            region=stored.region,
            places=(stored.region, *stored.copies) if stored.copies else (),
            addends=addends,
            place=len(addends),
        )


def ring_stored(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    """The whole sums of the own shard lie in `y`."""
    split = scatter.split
    wholes = (scatter.result(rank, split.piece(rank, piece)) for piece in range(split.pieces))
    return stored_round(split, scatter.slots, rank, [Stored(part) for part in wholes].__getitem__)
