"""A toy method: a gather whose shards are pushed in the reverse order, or from both ends at once, by an option.

It has what any method may have: an option of its own, a need, a grid for the tuner, and a margin before it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.operators.all_gather_matmul import OPERATOR
from overweave.ir.plan import COPY_ENGINE, TILE_KERNEL
from overweave.schedules.methods.gathers import by_moves
from overweave.schedules.methods.registry import register
from overweave.schedules.moves.gather_templates import Mesh
from overweave.schedules.moves.moves import GatherMove
from overweave.schedules.records import options
from overweave.schedules.records.record import Margin, MarginCase, Method, MethodRequest, Need


def reversed_pushes(mesh: Mesh) -> Iterator[GatherMove]:
    """From the rank before each rank back to the one behind it; in two lanes, the odd steps beside the even ones."""
    for step in range(mesh.world_size - 1, 0, -1):
        for rank in range(mesh.world_size):
            yield from mesh.pushes(rank, (rank - step) % mesh.world_size, rank, step % mesh.lanes)


def _a_few(asked: MethodRequest) -> str:
    ranks = asked.problem.world_size
    return f"of {ranks} ranks the first shard would come from too far" if ranks > 8 else ""


METHOD = Method(
    operator=OPERATOR.name,
    name="push_reversed",
    summary="pieces pushed in the reverse order, tiles of one kernel wait",
    write=by_moves(reversed_pushes),
    multiplies=TILE_KERNEL,
    moves=(COPY_ENGINE,),
    options=(options.PIECES, options.LANES, *options.TILES),
    needs=(Need("choice", _a_few),),
    grids=({"pieces": (1, 2), "lanes": (1, 2)},),
    margins=(MarginCase(margin=Margin(100.0, 0.1)),),
)


def add() -> None:
    """The one call: from now on every part of overweave knows the method."""
    register(METHOD)
