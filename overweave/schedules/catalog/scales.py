"""The scales of the rows of a matrix that is multiplied: of a gathered one they travel beside it.

That is a small gather of their own: each rank puts the scales of its shard to every peer at the head of the call, by
the copy engine, whoever moves the rows; what multiplies the rows of a peer waits for that peer's scales too. The own
ones are read where they lie; so are all of them where products are summed over ranks, and nothing but sums travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from overweave.ir.operators.forms import SCALE_DTYPE, SCALE_X
from overweave.ir.plan import LIBRARY, Engine
from overweave.ir.schedule import (
    INPUT,
    Buffer,
    Copy,
    InitialContents,
    Operation,
    Put,
    Queue,
)
from overweave.ir.tensors import scale_of
from overweave.schedules.communication import (
    COMPLETE,
    MAIN,
    SCALES,
    A,
    Communication,
    MatmulChunk,
    Split,
    gathered_by_library,
    is_empty,
    region,
    used,
)


def of_partials(communication: Communication, rows: int, firsts: tuple[int, ...]) -> Communication:
    """A sum of partials over ranks, the `rows` rows of each product multiplied by their own scales.

    firsts: where in the reduced axis the part of each rank begins.
    """
    own = Buffer(SCALE_X, rows, 1, "input", SCALE_DTYPE)
    scaled = (
        replace(step, scales=(region(own, step.rank, step.rows),)) if isinstance(step, MatmulChunk) else step
        for step in communication.steps
    )
    given = (
        InitialContents(region(own, rank, (0, rows)), scale_of(A), 0, first)
        for rank, first in enumerate(firsts)
        if rows
    )
    return replace(
        communication,
        buffers=(*communication.buffers, own),
        given=(*communication.given, *given),
        steps=tuple(scaled),
    )


class _Scales(Struct, frozen=True):
    """own: `[S, 1]`, the caller's. all: `[m, 1]`, in global place."""

    split: Split
    own: Buffer
    all: Buffer

    def peers(self, rank: int) -> list[int]:
        """Whom a rank puts its scales to, in its rotation."""
        return [self.split.peer(rank, -step) for step in range(1, self.split.world_size)]


def with_row_scales(communication: Communication, split: Split, engine: Engine) -> Communication:
    """An all-gather of row shards, and of the scales of their rows beside it. engine: which moves the shards."""
    ranks, rows = range(split.world_size), split.rows
    own = Buffer(SCALE_X, split.shard_size, 1, "input", SCALE_DTYPE)
    everyone = Buffer(SCALES, rows, 1, "local" if engine == LIBRARY else "symmetric", SCALE_DTYPE)
    scales = _Scales(split, own, everyone)
    homes = {buffer.name: buffer.home for buffer in communication.buffers}
    steps: list[Operation | MatmulChunk] = []
    for rank, of_rank in groupby(communication.steps, lambda step: step.rank):
        mine = [_scaled(scales, step, homes) if isinstance(step, MatmulChunk) else step for step in of_rank]
        steps += _moves(scales, rank, engine, any(_spans_all(scales, step) for step in mine))
        steps += mine
    is_put = any(isinstance(step, Put) and step.queue == SCALES for step in steps)
    return replace(
        communication,
        buffers=communication.buffers + used((own, everyone), steps),
        queues=communication.queues + ((Queue(SCALES, COMPLETE),) if is_put else ()),
        given=communication.given + tuple(_given(scales, rank) for rank in ranks if not is_empty(split.shard(rank))),
        steps=tuple(steps),
    )


def _given(scales: _Scales, rank: int) -> InitialContents:
    lo, hi = scales.split.shard(rank)
    return InitialContents(region(scales.own, rank, (0, hi - lo)), scale_of(A), lo, 0)


def _spans_all(scales: _Scales, step: Operation | MatmulChunk) -> bool:
    """Whether a Chunk reads the rows of all ranks at once, from one place."""
    return (
        isinstance(step, MatmulChunk)
        and step.scales[0].buffer == scales.all.name
        and step.rows == (0, scales.split.rows)
    )


def _scaled(scales: _Scales, chunk: MatmulChunk, homes: Mapping[str, str]) -> MatmulChunk:
    """A chunk with the scales of its rows."""
    if homes[chunk.region.buffer] == INPUT:
        return replace(chunk, scales=(region(scales.own, chunk.rank, chunk.region.rows),))
    return replace(chunk, scales=(region(scales.all, chunk.rank, chunk.rows),))


def _moves(scales: _Scales, rank: int, engine: Engine, keeps_own: bool) -> Iterator[Operation]:
    """What puts the own scales where they are read."""
    split = scales.split
    lo, hi = split.shard(rank)
    if split.world_size == 1 or split.rows == 0:
        return
    source = region(scales.own, rank, (0, hi - lo))
    if engine == LIBRARY:
        yield gathered_by_library(split, source, scales.all, "all_gather_scales")
        return
    if lo == hi:
        return
    for peer in scales.peers(rank):
        yield Put(
            name=f"push_scales.{rank}-{peer}",
            rank=rank,
            queue=SCALES,
            sources=(source,),
            destinations=(region(scales.all, peer, (lo, hi)),),
        )
    if keeps_own:
        target = region(scales.all, rank, (lo, hi))
        name = f"keep_scales.{rank}"
        yield Copy(name=name, rank=rank, queue=MAIN, sources=(source,), destinations=(target,))
