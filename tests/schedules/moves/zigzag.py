"""A small operator and its schedule: rows that are owned zigzag, two ranges a rank, are gathered before a matmul."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from overweave.ir.operators import registry
from overweave.ir.operators.all_gather_matmul import OPERATOR as GATHERED
from overweave.ir.plan import COPY_ENGINE, TILE_KERNEL
from overweave.ir.shards import owned_rows
from overweave.schedules.communication import Communication
from overweave.schedules.methods.registry import register
from overweave.schedules.moves.moves import Chunk, Collective, Gather, GatherMove, Put
from overweave.schedules.moves.transfers import transferred
from overweave.schedules.records.record import Method, MethodInputs

OPERATOR = replace(GATHERED, name="zigzag_gather_matmul", x=replace(GATHERED.x, ranges=2))


def pushes(rows: int, world_size: int) -> Iterator[GatherMove]:
    """Every range goes straight to every peer: first those from the front, then those from the end."""
    for at in range(2):
        for step in range(1, world_size):
            for rank in range(world_size):
                for lo, hi in owned_rows(rows, world_size, rank, 2)[at : at + 1]:
                    if lo < hi:
                        yield Put(rank, (rank + step) % world_size, Chunk((lo, hi)))


def collectives(rows: int, world_size: int) -> Iterator[GatherMove]:
    """The library gathers the ranges from the front, then those from the end; of neighbours, which are one, halves."""
    for at in range(2):
        parts: list[Chunk] = []
        for rank in range(world_size):
            first, *rest = owned_rows(rows, world_size, rank, 2)
            middle = (first[0] + first[1]) // 2
            parts.append(Chunk((first, *rest)[at] if rest else ((first[0], middle), (middle, first[1]))[at]))
        if world_size > 1 and rows:
            yield Collective(tuple(parts))


def _by_pushes(work: MethodInputs) -> Communication:
    size, rows = work.split.world_size, work.split.rows
    return transferred(Gather(size, tuple(pushes(rows, size)), ranges=2), rows, work.problem.k)


def _by_library(work: MethodInputs) -> Communication:
    size, rows = work.split.world_size, work.split.rows
    return transferred(Gather(size, tuple(collectives(rows, size)), ranges=2), rows, work.problem.k)


METHODS = (
    Method(
        operator=OPERATOR.name,
        name="push",
        summary="two ranges a rank, pushed, tiles of one kernel wait",
        write=_by_pushes,
        multiplies=TILE_KERNEL,
        moves=(COPY_ENGINE,),
        grids=({},),
    ),
    Method(
        operator=OPERATOR.name,
        name="per_range",
        summary="two ranges a rank, pushed, one library matmul for each",
        write=_by_pushes,
        moves=(COPY_ENGINE,),
        grids=({},),
    ),
    Method(
        operator=OPERATOR.name,
        name="sequential",
        summary="two library all-gathers, one library matmul",
        write=_by_library,
        grids=({},),
    ),
)


def add() -> None:
    """From now on the operator and its methods are known."""
    registry.register(OPERATOR)
    for method in METHODS:
        register(method)
