"""A toy schedule: all that one needs, in one file, registered by one call. Shards go to the farthest peer first."""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.operators.all_gather_matmul import OPERATOR
from overweave.ir.plan import COPY_ENGINE, TILE_KERNEL
from overweave.schedules.methods.gathers import by_moves
from overweave.schedules.methods.registry import register
from overweave.schedules.moves.gather_templates import Mesh
from overweave.schedules.moves.moves import GatherMove
from overweave.schedules.records import options
from overweave.schedules.records.record import Method


def farthest_first(mesh: Mesh) -> Iterator[GatherMove]:
    """In each step every rank serves the peer that is one nearer to it than the one before."""
    for step in range(1, mesh.world_size):
        for rank in range(mesh.world_size):
            yield from mesh.pushes(rank, (rank + step) % mesh.world_size, rank)


METHOD = Method(
    operator=OPERATOR.name,
    name="farthest_first",
    summary="pieces pushed to the farthest peer first, tiles of one kernel wait",
    write=by_moves(farthest_first),
    multiplies=TILE_KERNEL,
    moves=(COPY_ENGINE,),
    options=(options.PIECES, *options.TILES),
    grids=({},),
)


def add() -> None:
    """The one call: from now on every part of overweave knows the schedule."""
    register(METHOD)
