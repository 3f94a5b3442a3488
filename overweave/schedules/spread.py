"""All-gather of what tiles make: each rank's kernel writes its own `[rows, cols]`, every rank gets all of them.

The other end of an all-gather before a kernel: pieces leave as soon as their tiles are stored, and travel beside the
tiles of the next piece. What has arrived is copied to the caller's tensor when the kernel is done.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from overweave.ir.schedule import Buffer, Copy, Goal, Notify, Operation, Put, Queue, SignalPad, Wait
from overweave.ir.shards import piece_rows
from overweave.schedules.communication import (
    ARRIVED,
    COMPLETE,
    COMPUTED,
    COPIES,
    MAIN,
    TILES,
    A,
    Chunk,
    Communication,
    Y,
    is_empty,
    one,
    region,
    shifted,
    used,
)

OWN, GATHERED = "own", "gathered"


class Spread(Struct, frozen=True, kw_only=True):
    """`rows` rows of every rank, in `pieces` that begin at multiples of `alignment` rows."""

    rows: int
    cols: int
    world_size: int
    pieces: int = 1
    alignment: int = 1

    @property
    def own(self) -> Buffer:
        return Buffer(OWN, self.rows, self.cols, "local")

    @property
    def gathered(self) -> Buffer:
        return Buffer(GATHERED, self.world_size * self.rows, self.cols, "symmetric")

    @property
    def out(self) -> Buffer:
        return Buffer(Y, self.world_size * self.rows, self.cols, "output")


def spread(how: Spread) -> Communication:
    """The moves, with a `Chunk` where tiles write each piece: `out [world_size * rows, cols]` on every rank."""
    ranks = range(how.world_size)
    steps = [step for rank in ranks for step in (_push(how, rank) if how.world_size > 1 else _alone(how, rank))]
    pads = (SignalPad(COMPUTED, how.pieces), SignalPad(ARRIVED, how.world_size * how.pieces))
    return Communication(
        world_size=how.world_size,
        buffers=used((how.own, how.gathered, how.out), steps),
        pads=pads if how.world_size > 1 else (),
        queues=(Queue(MAIN, COMPLETE, after=(TILES,)), Queue(COPIES, COMPLETE)) if how.world_size > 1 else (),
        given=(),
        goal=tuple(Goal(region(how.out, rank, (0, how.out.rows)), A, 0, 0) for rank in ranks if how.rows),
        steps=tuple(steps),
    )


def _alone(how: Spread, rank: int) -> Iterator[Operation | Chunk]:
    """A group of one: what is made is the result."""
    if how.rows:
        yield Chunk(name=f"made.{rank}", rank=rank, rows=(0, how.rows), region=region(how.out, rank, (0, how.rows)))


def _push(how: Spread, rank: int) -> Iterator[Operation | Chunk]:
    pieces = piece_rows((0, how.rows), how.pieces, how.alignment)
    for piece, rows in enumerate(pieces):
        if not is_empty(rows):
            notifies = (Notify(COMPUTED, rank, piece),)
            yield Chunk(
                name=f"made.{rank}.{piece}", rank=rank, rows=rows, region=region(how.own, rank, rows), notifies=notifies
            )
        for step in range(1, how.world_size):
            peer = (rank - step) % how.world_size
            yield Put(
                name=f"push.{rank}-{peer}.{piece}",
                rank=rank,
                queue=COPIES,
                waits=() if is_empty(rows) else one(COMPUTED, piece),
                notifies=(Notify(ARRIVED, peer, rank * how.pieces + piece),),
                sources=(region(how.own, rank, rows),),
                destinations=(region(how.gathered, peer, shifted(rows, rank * how.rows)),),
            )
    yield _collect(how, rank)


def _collect(how: Spread, rank: int) -> Copy:
    """Own rows and what has arrived, to the caller's tensor."""
    lo, hi = rank * how.rows, (rank + 1) * how.rows
    rest = [rows for rows in ((0, lo), (hi, how.gathered.rows)) if not is_empty(rows)]
    signals = [(0, rank * how.pieces), ((rank + 1) * how.pieces, how.world_size * how.pieces)]
    return Copy(
        name=f"collect.{rank}",
        rank=rank,
        queue=MAIN,
        waits=tuple(Wait(ARRIVED, span, 1) for span in signals if not is_empty(span)),
        sources=(region(how.own, rank, (0, how.rows)), *(region(how.gathered, rank, rows) for rows in rest)),
        destinations=(region(how.out, rank, (lo, hi)), *(region(how.out, rank, rows) for rows in rest)),
    )
