"""All-gather of what tiles make: each rank's kernel writes its own `[rows, cols]`, every rank gets all of them.

The other end of an all-gather before a kernel: pieces leave as soon as their tiles are stored, and travel beside the
tiles of the next piece. What has arrived is copied to the caller's tensor when the kernel is done. The library's
all-gather stands behind the kernel, and brings all of it straight there.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from overweave.ir.schedule import Buffer, Copy, Goal, Notify, Operation, Put, Queue, SignalPad
from overweave.schedules.communication import (
    ARRIVED,
    COMPLETE,
    COMPUTED,
    COPIES,
    GATHERED,
    MAIN,
    TILES,
    A,
    Chunk,
    Communication,
    Split,
    Y,
    all_arrived,
    gathered_by_library,
    is_empty,
    one,
    region,
    shifted,
    used,
)
from overweave.schedules.moves.all_to_all import OWN


class _Spread(Struct, frozen=True):
    """split: of the rows of all ranks. own: a rank's shard, as its tiles write it."""

    split: Split
    own: Buffer
    gathered: Buffer
    out: Buffer


def spread(split: Split, cols: int, by_library: bool = False) -> Communication:
    """The moves, with a `Chunk` where tiles write each piece of a shard: `out [split.rows, cols]` on every rank.

    by_library: all of it behind the kernel, by the library's all-gather.
    """
    how = _Spread(
        split,
        Buffer(OWN, split.shard_size, cols, "local"),
        Buffer(GATHERED, split.rows, cols, "symmetric"),
        Buffer(Y, split.rows, cols, "output"),
    )
    ranks, is_alone = range(split.world_size), split.world_size == 1
    moves = _alone if is_alone else _gathered_at_once if by_library else _push
    steps = [step for rank in ranks for step in moves(how, rank)]
    pads = (SignalPad(COMPUTED, split.pieces), SignalPad(ARRIVED, split.world_size * split.pieces))
    copies = () if by_library else (Queue(COPIES, COMPLETE),)
    return Communication(
        world_size=split.world_size,
        buffers=used((how.own, how.gathered, how.out), steps),
        pads=() if is_alone or by_library else pads,
        queues=() if is_alone else (Queue(MAIN, COMPLETE, after=(TILES,)), *copies),
        given=(),
        goal=tuple(Goal(region(how.out, rank, (0, split.rows)), A, 0, 0) for rank in ranks if split.rows),
        steps=tuple(steps),
    )


def _alone(how: _Spread, rank: int) -> Iterator[Operation | Chunk]:
    """A group of one: what is made is the result."""
    rows = how.split.shard(rank)
    if not is_empty(rows):
        yield Chunk(name=f"made.{rank}", rank=rank, rows=rows, region=region(how.out, rank, rows))


def _gathered_at_once(how: _Spread, rank: int) -> Iterator[Operation | Chunk]:
    split = how.split
    own = region(how.own, rank, (0, split.shard_size))
    if split.rows:
        yield Chunk(name=f"made.{rank}", rank=rank, rows=own.rows, region=own)
        yield gathered_by_library(split, own, how.out)


def _push(how: _Spread, rank: int) -> Iterator[Operation | Chunk]:
    split = how.split
    for piece in range(split.pieces):
        rows = split.piece(rank, piece)
        made = shifted(rows, -split.shard(rank)[0])
        own = region(how.own, rank, made)
        if not is_empty(rows):
            notifies = (Notify(COMPUTED, rank, piece),)
            yield Chunk(name=f"made.{rank}.{piece}", rank=rank, rows=made, region=own, notifies=notifies)
        for peer in reversed(split.peers(rank)):
            yield Put(
                name=f"push.{rank}-{peer}.{piece}",
                rank=rank,
                queue=COPIES,
                waits=() if is_empty(rows) else one(COMPUTED, piece),
                notifies=(Notify(ARRIVED, peer, split.signal(rank, piece)),),
                sources=(own,),
                destinations=(region(how.gathered, peer, rows),),
            )
    yield _collect(how, rank)


def _collect(how: _Spread, rank: int) -> Copy:
    """Own rows and what has arrived, to the caller's tensor."""
    lo, hi = how.split.shard(rank)
    rest = [rows for rows in ((0, lo), (hi, how.split.rows)) if not is_empty(rows)]
    return Copy(
        name=f"collect.{rank}",
        rank=rank,
        queue=MAIN,
        waits=all_arrived(how.split, rank),
        sources=(region(how.own, rank, (0, hi - lo)), *(region(how.gathered, rank, rows) for rows in rest)),
        destinations=(region(how.out, rank, (lo, hi)), *(region(how.out, rank, rows) for rows in rest)),
    )
