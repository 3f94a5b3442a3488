"""A toy schedule: all that one needs. Shards go to the farthest peer first."""

from collections.abc import Iterator

from overweave.schedules.methods.by_moves import method_of_moves
from overweave.schedules.moves.gather_templates import Mesh
from overweave.schedules.moves.moves import GatherMove


def farthest_first(mesh: Mesh) -> Iterator[GatherMove]:
    """Pieces are pushed to the farthest peer first, and tiles of one kernel wait."""
    for step in range(1, mesh.world_size):
        for rank in range(mesh.world_size):
            yield from mesh.pushes(rank, (rank + step) % mesh.world_size, rank)


METHOD = method_of_moves(farthest_first, grids=({},))
