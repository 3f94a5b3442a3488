"""Sums round a ring: each piece travels from its owner's successor to the owner, and tiles on the way add their own.

Each hop's sum is rounded, the owner's partial comes last. Of a sum that a copy brings tiles wait late: it was computed
one step ago, and travels while they multiply. Tiles that store at the next rank themselves send their sum with the end
of a tile; an owner's then store the whole sum at every rank that wants it, and what remains is to move peers' sums to
`y`. SOURCE: the ring of the libraries' own collectives (NCCL); Flux (arXiv 2406.06858) 4.1 for stores at a peer.
"""

from __future__ import annotations

from overweave.schedules.communication import PARTIAL, SLOTS, TOTAL, Chunk, Y
from overweave.schedules.families.summed import Family, Steps, Summed


def _ring(how: Summed, rank: int) -> Steps:
    """The pieces of the rank before it start here, the own ones end here."""
    split, size = how.split, how.split.world_size
    following = (rank + 1) % size
    for step in range(1, size + 1):
        owner = (rank - step) % size
        for piece, rows in how.parts(owner):
            name, out = f"{rank}-{owner}.{piece}", how.region(PARTIAL, rank, rows)
            if step == size:
                out = how.region(Y, rank, rows) if how.everywhere and not how.is_normed else how.whole(rank, rows)
            addends = () if step == 1 else (how.region(SLOTS, rank, rows),)
            yield Chunk(name=f"multiply.{name}", rank=rank, rows=rows, region=out, addends=addends, place=len(addends))
            if step < size:
                yield how.put(f"pass.{name}", 1, out, how.region(SLOTS, following, rows))
            for away, peer in enumerate(split.peers(rank) if how.everywhere and step == size else (), 1):
                yield how.put(f"share.{rank}-{peer}.{piece}", away, out, how.region(TOTAL, peer, rows))
    # Own sums are in `y`, or, where who moves them norms them, come first, as they are surely here.
    own = (rank,) if how.is_normed else ()
    for owner in (*own, *reversed(split.peers(rank))) if how.everywhere else ():
        yield from (how.moved(rank, owner, piece, rows) for piece, rows in how.parts(owner))


RING = Family(_ring, beside=False)
