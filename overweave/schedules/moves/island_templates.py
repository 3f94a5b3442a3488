"""Lists of chunk moves on two levels: inside islands by their own memory, between them once for each chunk.

An island is the ranks that map each other's memory, or that lie close. What crosses travels in columns, of one rank of
each island: of the same place in it, counted round where islands have fewer ranks. `carrier` of the mesh says who
carries it: the copy engine, or the library, in calls of a column beside the tiles.
SOURCE: AutoOverlap 5.1 and its Figure 4 (heterogeneous by levels of a mesh); Flux (arXiv 2406.06858) 5.1 (two nodes).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from overweave.ir.plan import LIBRARY
from overweave.schedules.moves.gather_templates import Mesh
from overweave.schedules.moves.moves import GatherMove, Put, ReductionStep, Sum

INSIDE, ACROSS, ONWARD = 0, 1, 1  # lanes; what is passed on has that of what crosses, which is the library's


class Crossing(NamedTuple):
    """A shard's way from one rank to another. owner: whose rows it is, after an exchange; origin: as of a Put."""

    rank: int
    peer: int
    owner: int
    origin: int | None = None


class IslandMap:
    """Where the ranks of a mesh lie. members: the ranks of each island. followed: those whose moves are written, and
    what comes to them."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.members = mesh, mesh.islands
        self.places = {rank: (at, place) for at, one in enumerate(self.members) for place, rank in enumerate(one)}
        self.ranks, self.followed = range(mesh.world_size), frozenset(mesh.ranks)

    @property
    def most(self) -> int:
        """Return the ranks of the largest island."""
        return max(map(len, self.members))

    def own(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's island."""
        return self.members[self.places[rank][0]]

    def beside(self, rank: int, inner: int) -> int:
        """Return the rank so many places further, round its island."""
        own = self.own(rank)
        return own[(self.places[rank][1] + inner) % len(own)]

    def facing(self, rank: int, outer: int) -> int:
        """Return the rank of a rank's column in the island so many further, round all."""
        at, place = self.places[rank]
        other = self.members[(at + outer) % len(self.members)]
        return other[place % len(other)]

    def column(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's column, ascending; none, which is all, where islands of unlike sizes would have
        columns that share ranks: no rank takes part in two groups."""
        if len({*map(len, self.members)}) > 1:
            return ()
        return tuple(sorted({self.facing(rank, outer) for outer in range(len(self.members))}))

    def faced(self, rank: int, outer: int) -> list[int]:
        """Return the ranks of the island so many further that face this one: several where that island is larger."""
        other = self.members[(self.places[rank][0] + outer) % len(self.members)]
        return [each for each in other if self.facing(each, -outer) == rank]

    def neighbours(self) -> Iterator[tuple[int, int]]:
        """Yield (rank, how many places further) for each peer of each rank in its island, all ranks step by step."""
        ranks = self.mesh.ranks
        return ((rank, inner) for inner in range(1, self.most) for rank in ranks if inner < len(self.own(rank)))

    def across(self, hops: Iterable[Crossing]) -> Iterator[Put]:
        """Yield the pushes of hops between islands. The library's are in the order of its calls: one chunk of each
        hop of a column."""
        crossing = (hop for hop in hops if hop.rank in self.followed or hop.peer in self.followed)
        puts = [(index, put) for hop in crossing for index, put in enumerate(self.pushes(hop, ACROSS))]
        if self.mesh.carrier != LIBRARY:
            return (put for _, put in puts)
        together = sorted((index, self.column(put.rank), at) for at, (index, put) in enumerate(puts))
        return (replace(puts[at][1], lane=0, mover=LIBRARY, among=column) for _, column, at in together)

    def pushes(self, hop: Crossing, lane: int) -> Iterator[Put]:
        """Yield the pushes of a hop: of all chunks of the owner's shard."""
        puts = self.mesh.pushes(hop.rank, hop.peer, hop.owner, lane)
        return puts if hop.origin is None else (replace(put, origin=hop.origin) for put in puts)


def gather(mesh: Mesh) -> Iterator[GatherMove]:
    """Shards are gathered inside every island while each crosses to the others once, and there it is passed on."""
    islands = IslandMap(mesh)
    for rank, inner in islands.neighbours():
        yield from mesh.pushes(rank, islands.beside(rank, -inner), rank, INSIDE)
    for outer in range(1, len(islands.members)):
        yield from islands.across(Crossing(rank, islands.facing(rank, -outer), rank) for rank in islands.ranks)
        for rank, inner in islands.neighbours():
            for owner in islands.faced(rank, outer):
                yield from mesh.pushes(rank, islands.beside(rank, -inner), owner, INSIDE)


def sums(mesh: Mesh) -> Iterator[ReductionStep]:
    """Partials are added inside every island, by the rank that lies as their owner does; that sum crosses, once."""
    islands = IslandMap(mesh)
    for outer in (*range(1, len(islands.members)), 0):
        for rank, inner in islands.neighbours():
            adder = islands.beside(rank, inner)
            for owner in islands.faced(adder, outer):
                yield from mesh.pushes(rank, adder, owner, INSIDE)
        if outer:
            served = [(adder, owner) for adder in islands.ranks for owner in islands.faced(adder, outer)]
            whole = [(adder, owner) for adder, owner in served if adder in islands.followed]
            added = [(adder, owner) for adder, owner in whole if len(islands.own(adder)) > 1]
            yield from (Sum(adder, line) for adder, owner in added for line in mesh.lines(owner))
            yield from islands.across(Crossing(adder, owner, owner) for adder, owner in served)


def exchange(mesh: Mesh, sends: bool) -> Iterator[Put]:
    """Blocks for another island go to the rank of it that faces their sender, which passes on those of its peers.

    sends: tiles write what moves, those first whose products have the longest way; else they read what has arrived,
    that of their own island first.
    """
    islands = IslandMap(mesh)
    near = ((rank, islands.beside(rank, inner)) for rank, inner in islands.neighbours())
    inside = [Crossing(rank, peer, peer) for rank, peer in near]
    if not sends:
        yield from (put for hop in inside for put in islands.pushes(hop, INSIDE))
    for outer in range(1, len(islands.members)):
        for inner in range(islands.most):
            hops = [hop for rank in islands.ranks for hop in _crossing(islands, rank, outer, inner)]
            yield from islands.across(hops)
            onward = (Crossing(hop.peer, hop.owner, hop.owner, hop.origin) for hop in hops if hop.peer != hop.owner)
            onward = (hop for hop in onward if hop.rank in islands.followed)
            yield from (put for hop in onward for put in islands.pushes(hop, ONWARD))
    if sends:
        yield from (put for hop in inside for put in islands.pushes(hop, INSIDE))


def _crossing(islands: IslandMap, rank: int, outer: int, inner: int) -> Iterator[Crossing]:
    """Yield the way of a rank's block for the rank so many places behind the one that it faces, if there is one."""
    via = islands.facing(rank, outer)
    if inner < len(islands.own(via)):
        owner = islands.beside(via, inner)
        yield Crossing(rank, via, owner, rank if owner != via else None)
