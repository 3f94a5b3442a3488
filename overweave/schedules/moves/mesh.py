"""The mesh of a split: what the options of a schedule say of chunks and of how ranks lie."""

from __future__ import annotations

from overweave.schedules.catalog.options import Settings
from overweave.schedules.communication import Split
from overweave.schedules.moves.gather_templates import Mesh


def mesh_of(split: Split, cols: int, settings: Settings) -> Mesh:
    """Chunks begin where the split's pieces do."""
    return Mesh(
        rows=split.rows,
        cols=cols,
        world_size=split.world_size,
        pieces=split.pieces,
        col_pieces=settings.col_pieces,
        alignment=split.alignment,
        island=settings.island,
        axis=settings.axis,
        lanes=settings.lanes,
        order=settings.order,
        rotation=settings.rotation,
        mover=settings.mover,
        copy_programs=settings.copy_programs,
    )
