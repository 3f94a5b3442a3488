"""Reduce-scatter by sums that pull: tiles store at home, and each owner's kernel reads its rows where they lie.

Nothing is pushed, and no slots are needed: as soon as the tiles of a piece of a peer's rows are stored, its owner is
told so. A stream does that, which waits and writes a signal; sums of the owner's parts run beside its last tiles.
SOURCE: Flux (arXiv 2406.06858) 4.2: where tiles store locally, others load ready remote tiles and reduce them.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.schedule import Operation
from overweave.schedules.communication import Chunk, is_empty, region
from overweave.schedules.families.scattered import Scatter


def scatter_pull(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    """Peers' rows; then the own ones, in parts that are summed in rank order."""
    split = scatter.split
    for step, piece in split.steps():
        peer = split.peer(rank, step)
        if not is_empty(split.piece(peer, piece)):
            yield scatter.part(rank, peer, piece)
    yield from scatter.own_chunks(rank)
    for index, rows in enumerate(scatter.own_parts(rank)):
        partials = tuple(region(scatter.partial, source, rows) for source in range(split.world_size))
        yield scatter.sum(rank, index, rows, partials)
