"""A toy method: an option of its own, a need, a grid for the tuner, and a margin before it is taken unmeasured."""

from collections.abc import Iterator

from overweave.schedules.methods.by_moves import method_of_moves
from overweave.schedules.moves.gather_templates import Mesh
from overweave.schedules.moves.moves import GatherMove
from overweave.schedules.records.needs import most_ranks
from overweave.schedules.records.options import LANES


def push_reversed(mesh: Mesh) -> Iterator[GatherMove]:
    """Pieces are pushed in the reverse order, in one lane or two, and tiles of one kernel wait."""
    for step in range(mesh.world_size - 1, 0, -1):
        for rank in range(mesh.world_size):
            yield from mesh.pushes(rank, (rank - step) % mesh.world_size, rank, step % mesh.lanes)


GRID = {"pieces": (1, 2), "lanes": (1, 2)}
METHOD = method_of_moves(push_reversed, options=(LANES,), needs=(most_ranks(8),), grids=(GRID,))
