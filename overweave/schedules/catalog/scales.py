"""The scales of the rows of a matrix that is multiplied: of a gathered one they travel beside it.

That is a small gather of their own: each rank puts the scales of its shard to every peer at the head of the call, by
the copy engine, whoever moves the rows; what multiplies the rows of a peer waits for that peer's scales too. The own
ones are read where they lie; so are all of them where products are summed over ranks, and nothing but sums travels.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

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
    Region,
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
    region,
    shifted,
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


def with_row_scales(communication: Communication, split: Split, engine: Engine) -> Communication:
    """An all-gather of row shards, and of the scales of their rows beside it. engine: which moves the shards."""
    own = Buffer(SCALE_X, split.shard_size, 1, "input", SCALE_DTYPE)
    whole = Buffer(SCALES, split.rows, 1, "local" if engine == LIBRARY else "symmetric", SCALE_DTYPE)
    inputs = {buffer.name for buffer in communication.buffers if buffer.home == INPUT}
    shards = {rank: split.shard(rank) for rank in range(split.world_size)}
    held = {rank: region(own, rank, shifted(rows, -rows[0])) for rank, rows in shards.items()}
    some = (rank for rank in shards if not held[rank].is_empty)
    given = (InitialContents(held[rank], scale_of(A), shards[rank][0], 0) for rank in some)

    def scaled(step: Operation | MatmulChunk) -> Operation | MatmulChunk:
        if not isinstance(step, MatmulChunk):
            return step
        is_own = step.region.buffer in inputs
        scales = region(own if is_own else whole, step.rank, step.region.rows if is_own else step.rows)
        return replace(step, scales=(scales,))

    steps: list[Operation | MatmulChunk] = []
    for rank, of_rank in groupby(communication.steps, lambda step: step.rank):
        mine, every = list(map(scaled, of_rank)), region(whole, rank, (0, split.rows))
        keeps_own = any(isinstance(step, MatmulChunk) and step.scales == (every,) for step in mine)
        steps += (*_moves(split, held[rank], whole, engine, keeps_own), *mine)
    is_put = any(isinstance(step, Put) and step.queue == SCALES for step in steps)
    return replace(
        communication,
        buffers=communication.buffers + used((own, whole), steps),
        queues=communication.queues + ((Queue(SCALES, COMPLETE),) if is_put else ()),
        given=(*communication.given, *given),
        steps=tuple(steps),
    )


def _moves(split: Split, own: Region, whole: Buffer, engine: Engine, keeps_own: bool) -> Iterator[Operation]:
    """What puts a rank's own scales where they are read. keeps_own: a chunk reads those of all ranks in one place."""
    rank, rows = own.rank, split.shard(own.rank)
    if split.world_size == 1 or split.rows == 0:
        return
    if engine == LIBRARY:
        yield gathered_by_library(split, own, whole, "all_gather_scales")
        return
    for peer in (split.peer(rank, -step) for step in range(1, split.world_size) if not own.is_empty):
        yield Put(
            name=f"push_scales.{rank}-{peer}",
            rank=rank,
            queue=SCALES,
            sources=(own,),
            destinations=(region(whole, peer, rows),),
        )
    if keeps_own and not own.is_empty:
        target, name = region(whole, rank, rows), f"keep_scales.{rank}"
        yield Copy(name=name, rank=rank, queue=MAIN, sources=(own,), destinations=(target,))
