"""All-gathers as lists of chunk moves: the library's, to or from every peer, round rings.

Every template takes the same `Mesh`: how shards are cut into chunks and how ranks lie. Lists are written step by step
for all ranks, so that tiles run in the order in which a rank meets the others: rank + 1, rank + 2, ...
SOURCE: Flux (arXiv 2406.06858) 4.2 for pull, push and rotation; AutoOverlap 5.1 and its Figure 4 (ring,
partition-based, heterogeneous by levels of a mesh); FiCCO for pieces from all peers at once, by rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeGuard

from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.shards import piece_rows, shard_rows
from overweave.schedules.communication import Split
from overweave.schedules.moves.moves import ENGINE, AllToAll, Chunk, Collective, Gather, GatherMove, Get, Put

SplitAxis = Literal["inner", "outer"]
COLS_ALIGNMENT = 8  # elements: columns of a chunk begin where words of 16 bytes do


Template = Callable[["Mesh"], Iterator[GatherMove]]


class Mesh(Split, frozen=True, kw_only=True):
    """A split of `[rows, cols]` on ranks that lie in rows of `island` (None: pairs, where these come out even).

    members: the ranks of each island, where they need not lie so; carrier: who carries what crosses between islands.
    col_pieces: chunks of a shard by columns. axis: along which ranks are met first, inside an island or across islands.
    lanes: moves of a rank under way at once. order, rotation: of push and pull. mover: who carries what is a rank's
    own, on `copy_programs` SMs if a kernel does; the rest is the copy engine's.
    """

    cols: int
    col_pieces: int = 1
    island: int | None = None
    members: tuple[tuple[int, ...], ...] = ()
    carrier: Literal["copy_engine", "library"] = "copy_engine"
    axis: SplitAxis = "inner"
    lanes: int = 1
    copy_programs: int = 16

    def steps(self) -> list[tuple[int, int]]:
        """From a rank to each of the others, as lines and places in a line that lie between, in the order of `axis`."""
        steps = [(outer, inner) for outer in range(self.world_size // self.width) for inner in range(self.width)]
        if self.axis == "outer":
            steps.sort(key=lambda step: step[::-1])
        return steps[1:]

    def away(self, rank: int, outer: int, inner: int) -> int:
        """The rank so many lines and places further, round the mesh."""
        line = (rank // self.width + outer) % (self.world_size // self.width)
        return line * self.width + (rank + inner) % self.width

    def turns(self) -> Iterator[tuple[int, int, int]]:
        """(rank, peer, piece): whose shard each rank meets when, all ranks step by step."""
        ranks, steps, pieces = range(self.world_size), range(1, self.world_size), range(self.pieces)
        if self.order == "ring":
            met = ((rank, step, piece) for step in steps for rank in ranks for piece in pieces)
        else:
            met = ((rank, step, piece) for piece in pieces for step in steps for rank in ranks)
        return ((rank, self.peer(rank, step), piece) for rank, step, piece in met)

    def lane(self, rank: int, owner: int) -> int:
        """One for all in ring order, else one for each distance."""
        return 0 if self.order == "ring" else (owner - rank) % self.world_size

    @property
    def width(self) -> int:
        """Ranks of an island. Raises InputError if islands do not come out even."""
        width = self.island or (2 if self.world_size % 2 == 0 else 1)
        if self.world_size % width:
            found = f"{self.world_size} ranks are no whole islands"
            raise InputError(f"islands of {width}", found, "Use a divisor of the ranks, or auto")
        return width

    @property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each island. Raises InputError if islands do not come out even."""
        lines = range(0, self.world_size, self.width) if not self.members else ()
        return self.members or tuple(tuple(range(first, first + self.width)) for first in lines)

    def lines(self, rank: int) -> tuple[Chunk, ...]:
        """The chunks of a rank's shard as they are added: whole rows."""
        return replace(self, col_pieces=1).chunks(rank)

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """The chunks of a rank's shard, row by row. None is empty."""
        return tuple(chunk for piece in range(self.pieces) for chunk in self.piece(rank, piece))

    def piece(self, rank: int, piece: int) -> tuple[Chunk, ...]:
        """The chunks of one piece of its rows."""
        rows = self.piece_of(rank, piece)
        cols = [pair for pair in piece_rows((0, self.cols), self.col_pieces, COLS_ALIGNMENT) if pair[0] < pair[1]]
        return tuple(Chunk(rows, None if self.col_pieces == 1 else pair) for pair in cols if rows[0] < rows[1])

    def pushes(self, rank: int, peer: int, owner: int, lane: int | None = None) -> Iterator[Put]:
        """Of all chunks of an owner's shard; without a lane, dealt to all lanes."""
        for index, chunk in enumerate(self.chunks(owner)):
            yield Put(rank, peer, chunk, index % self.lanes if lane is None else lane)


def may_be_carried(move: object) -> TypeGuard[Put]:
    """Whether the mesh says who carries a move: a Put that its template leaves to the copy engine."""
    return isinstance(move, Put) and move.mover == ENGINE


def gather_of(written: Template, mesh: Mesh) -> Gather:
    """The moves that a template writes, what is a rank's own carried as the mesh says. Raises InputError."""
    own = [frozenset(mesh.chunks(rank)) for rank in range(mesh.world_size)]
    moves = (
        replace(move, mover=mesh.mover) if may_be_carried(move) and move.chunk in own[move.rank] else move
        for move in written(mesh)
    )
    return Gather(mesh.world_size, tuple(moves), mesh.copy_programs)


def all_to_all_of(sends: bool, by_library: bool, mesh: Mesh) -> AllToAll:
    """The moves of an all-to-all: every rank serves one peer after the other, or the library carries all."""
    moves: tuple[Put | Collective, ...]
    if by_library:
        moves = tuple(move for move in at_once(mesh) if isinstance(move, Collective))
    else:
        served = (turn if sends else (turn[1], turn[0], turn[2]) for turn in mesh.turns())
        moves = tuple(
            Put(rank, peer, chunk, mesh.lane(rank, peer), mover=mesh.mover)
            for rank, peer, piece in served
            for chunk in mesh.piece(peer, piece)
        )
    return AllToAll(mesh.world_size, moves, sends, mesh.copy_programs)


def at_once(mesh: Mesh) -> Iterator[GatherMove]:
    """The library's, of whole shards."""
    if mesh.world_size > 1 and mesh.rows:
        yield Collective(tuple(Chunk(shard_rows(mesh.rows, mesh.world_size, rank)) for rank in range(mesh.world_size)))


def push(mesh: Mesh) -> Iterator[GatherMove]:
    """Owners push straight to every peer."""
    for rank, owner, piece in mesh.turns():
        for chunk in mesh.piece(owner, piece):
            yield Put(owner, rank, chunk, mesh.lane(rank, owner))


def push_to_all(mesh: Mesh) -> Iterator[GatherMove]:
    """Owners push straight to every peer, one piece to all of them before the next."""
    for rank, owner, piece in replace(mesh, order="all_peers").turns():
        for chunk in mesh.piece(owner, piece):
            yield Put(owner, rank, chunk)


def pull(mesh: Mesh) -> Iterator[GatherMove]:
    """Every rank gets its peers' chunks from where they have staged them."""
    for rank, owner, piece in mesh.turns():
        for chunk in mesh.piece(owner, piece):
            yield Get(rank, owner, chunk, mesh.lane(rank, owner))


def across_mesh(mesh: Mesh) -> Iterator[GatherMove]:
    """Owners push straight to every peer, peers of one line of the mesh before those of the next."""
    for outer, inner in mesh.steps():
        for rank in range(mesh.world_size):
            peer = mesh.away(rank, -outer, -inner)
            yield from mesh.pushes(rank, peer, rank)


def round_ring(mesh: Mesh) -> Iterator[GatherMove]:
    """Every rank passes on what came from the next one: each link carries one shard at a time, to a neighbour."""
    for step in range(1, mesh.world_size):
        for rank in range(mesh.world_size):
            yield from mesh.pushes(rank, (rank - 1) % mesh.world_size, (rank + step - 1) % mesh.world_size)


def round_two_rings(mesh: Mesh) -> Iterator[GatherMove]:
    """Two rings at once, one each way, in lanes of their own: chunks of every shard are dealt to them by turns."""
    size = mesh.world_size
    for step in range(1, size):
        for way in (1, -1):
            for rank in range(size):
                owner = (rank + way * (step - 1)) % size
                for index, chunk in enumerate(mesh.chunks(owner)):
                    if (index % 2 == 0) == (way > 0):
                        yield Put(rank, (rank - way) % size, chunk, index % 2)
