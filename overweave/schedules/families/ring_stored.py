"""All-reduces round a ring: tiles add one sum each and store it at the next rank (schedules/families/scatter_rings.py).

The tiles of an owner store the whole sum in the own `y` and at every peer, so that both shots leave with the end of a
tile; what remains behind the last one is to move the peers' sums, which by then lie in the own workspace.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.schedule import Operation
from overweave.schedules.communication import Chunk, is_empty, region
from overweave.schedules.families.reduced import Reduced
from overweave.schedules.families.scatter_rings import Stored, stored_round
from overweave.schedules.families.two_shot import move_of


def ring_stored(reduced: Reduced, rank: int) -> Iterator[Operation | Chunk]:
    """The parts go round a ring, the sums to every rank, which moves them. Own ones are in `y` at once; or, where who
    moves them norms them, they come first, as they are surely here."""
    split = reduced.split
    yield from stored_round(split, reduced.slots, rank, lambda piece: _everywhere(reduced, rank, piece))
    own = (rank,) if reduced.summing.is_normed else ()
    for owner in (*own, *reversed(reduced.split.peers(rank))):
        for piece in range(split.pieces):
            if not is_empty(split.piece(owner, piece)):
                yield move_of(reduced, rank, owner, piece)


def _everywhere(reduced: Reduced, rank: int, piece: int) -> Stored:
    """The sum of an own piece at every rank, in the same place of the workspace, or, here, of `y`."""
    rows = reduced.split.piece(rank, piece)
    here = region(reduced.total if reduced.summing.is_normed else reduced.y, rank, rows)
    return Stored(here, tuple(region(reduced.total, peer, rows) for peer in reduced.split.peers(rank)))
