"""Reduce-scatters and all-reduces as lists of chunk moves: straight across a mesh, round a ring or two.

The same `Mesh` as of gathers cuts the tensor and lays out the ranks. Every template moves peers' shards first and the
own one never, whose tiles are then the last. An all-reduce is a reduce-scatter, sums, and the gather of the same name.
SOURCE: AutoOverlap 5.1 and its Figure 4 (partition-based all-reduce, ring, levels of a mesh); Flux (arXiv 2406.06858)
4.1 for peers first and each rank beginning with its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from overweave.ir.schedule import Range
from overweave.schedules.communication import Mover
from overweave.schedules.moves.gather_templates import Mesh, Template, gather_of, may_be_carried
from overweave.schedules.moves.moves import Chunk, Get, Put, Reduction, ReductionStep, Sum


def reduction_of(written: Callable[[Mesh], Iterator[ReductionStep]], shared: Template | None, mesh: Mesh) -> Reduction:
    """The moves that a template writes. shared: the gather by which all ranks get the sums; None: they keep their
    shards. Raises InputError.
    """
    moves = list(_carried(mesh, written(mesh)))
    if shared and mesh.world_size > 1:
        moves += [Sum(rank, chunk) for rank in range(mesh.world_size) for chunk in mesh.lines(rank)]
        gathered = gather_of(shared, replace(mesh, mover="copy_engine"))
        moves += [move for move in gathered.moves if isinstance(move, Put)]
    return Reduction(mesh.world_size, tuple(moves), shared is not None, mesh.copy_programs)


def _carried(mesh: Mesh, moves: Iterable[ReductionStep]) -> Iterator[ReductionStep]:
    """The same, own partials carried as the mesh says."""
    added: set[tuple[int, Range]] = set()
    for move in moves:
        if isinstance(move, Sum):
            added.add((move.rank, move.chunk.rows))
        is_own = may_be_carried(move) and (move.rank, move.chunk.rows) not in added
        yield replace(move, mover=mesh.mover) if is_own else move


def across_mesh(mesh: Mesh) -> Iterator[ReductionStep]:
    """Every partial goes straight to its owner, owners in one line of the mesh before those in the next."""
    for outer, inner in mesh.steps():
        for rank in range(mesh.world_size):
            owner = mesh.away(rank, outer, inner)
            yield from mesh.pushes(rank, owner, owner)


def round_ring(mesh: Mesh) -> Iterator[ReductionStep]:
    """A shard's partials travel round to its owner, and every rank on the way adds its own."""
    for step in range(1, mesh.world_size):
        for rank in range(mesh.world_size):
            owner = (rank - step) % mesh.world_size
            for index, line in enumerate(mesh.lines(owner)):
                yield from _hop(mesh, (rank, (rank + 1) % mesh.world_size, owner), line, index % mesh.lanes)


def round_two_rings(mesh: Mesh) -> Iterator[ReductionStep]:
    """Two rings at once, one each way, in lanes of their own: lines of every shard are dealt to them by turns."""
    for step in range(1, mesh.world_size):
        for lane, way in enumerate((1, -1)):
            for rank in range(mesh.world_size):
                owner = (rank - way * step) % mesh.world_size
                for line in mesh.lines(owner)[lane::2]:
                    yield from _hop(mesh, (rank, (rank + way) % mesh.world_size, owner), line, lane)


def _hop(mesh: Mesh, ranks: tuple[int, int, int], line: Chunk, lane: int) -> Iterator[ReductionStep]:
    """ranks: who passes it on, to whom, and its owner. The one behind the owner has its own partial alone."""
    rank, peer, owner = ranks
    if (rank - owner) % mesh.world_size != (peer - rank) % mesh.world_size:
        yield Sum(rank, line)
    yield from (Put(rank, peer, chunk, lane) for chunk in mesh.chunks(owner) if chunk.rows == line.rows)


# Templates of operators' sums: their tiles may add, and the own shard may be summed in pieces.


class ReductionTemplate(Struct, frozen=True):
    """The input of a template of sums. by: who adds. own_pieces: pieces in which a kernel sums the own shard.
    everywhere: every rank gets all sums. on_arrival: what arrives is added to what has, in no order, before the own
    partial."""

    mesh: Mesh
    by: Literal["kernel", "tiles"] = "kernel"
    own_pieces: int = 1
    everywhere: bool = False
    on_arrival: bool = False

    def put(self, rank: int, peer: int, chunk: Chunk, mover: Mover | None = None) -> Put:
        """Return a push to a peer, in the lane of its distance."""
        lane = self.mesh.lane(rank, peer)
        return Put(rank, peer, chunk, lane, mover=mover or self.mesh.mover, adds=self.on_arrival)

    def own(self, rank: int, pieces: int) -> Iterator[ReductionStep]:
        """Return the sums of a rank's own shard, piece by piece."""
        own = replace(self.mesh, pieces=pieces).chunks(rank)
        return (Sum(rank, chunk, by=self.by, own_last=self.on_arrival) for chunk in own)

    def shares(self, chunks: Callable[[int], Iterable[Chunk]], mover: Mover) -> Iterator[ReductionStep]:
        """Yield the pushes of each rank's sums to all peers, the nearest first."""
        size = self.mesh.world_size
        for step, rank in product(range(1, size), range(size)):
            yield from (self.put(rank, (rank + step) % size, chunk, mover) for chunk in chunks(rank))


def straight(sums: ReductionTemplate) -> Iterator[ReductionStep]:
    """Every partial goes straight to its owner, peers' first; everywhere, each piece of all before the next."""
    mesh = sums.mesh
    for rank, owner, piece in (replace(mesh, order="all_peers") if sums.everywhere else mesh).turns():
        yield from (sums.put(rank, owner, chunk) for chunk in mesh.piece(owner, piece))
    pieces = mesh.pieces if sums.everywhere or sums.by == "tiles" else sums.own_pieces
    for rank in range(mesh.world_size):
        yield from sums.own(rank, pieces)
    for piece in range(mesh.pieces if sums.everywhere else 0):
        yield from sums.shares(partial(mesh.piece, piece=piece), "copy_engine")


def in_place(sums: ReductionTemplate) -> Iterator[ReductionStep]:
    """Nothing moves: owners read what peers' tiles have stored, peers' rows first, as they add it."""
    mesh = sums.mesh
    for rank, owner, piece in mesh.turns():
        yield from (Get(owner, rank, chunk, in_place=True) for chunk in mesh.piece(owner, piece))
    for rank in range(mesh.world_size):
        yield from sums.own(rank, sums.own_pieces)


def round_ring_of_tiles(sums: ReductionTemplate) -> Iterator[ReductionStep]:
    """Each piece travels from its owner's successor to the owner, and tiles on the way add their own."""
    mesh, size = sums.mesh, sums.mesh.world_size
    for step, rank in product(range(1, size + 1), range(size)):
        for chunk in mesh.chunks((rank - step) % size):
            if step > 1:
                yield Sum(rank, chunk, by=sums.by, own_last=True)
            if step < size:
                yield Put(rank, (rank + 1) % size, chunk, mover=mesh.mover)
    yield from sums.shares(mesh.chunks, mesh.mover) if sums.everywhere else ()


def one_shot(sums: ReductionTemplate) -> Iterator[ReductionStep]:
    """Whole partials go to every peer, and every rank adds them all."""
    whole = Chunk((0, sums.mesh.rows))
    yield from sums.shares(lambda rank: (whole,) if sums.mesh.rows else (), sums.mesh.mover)
