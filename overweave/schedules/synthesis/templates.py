"""Synthesis: moves written for the links of a machine, where every template knows one shape of machine.

An all-gather is searched (search.py). A reduce-scatter is its mirror: all transfers backwards in time, from their
targets, each of the sum of what its sender has by then. An all-to-all has no third ranks to pass anything on: what is
searched is the order in which every rank serves its peers, so that no link of their routes has two copies at once.
A lane is a link by which a rank sends: copies over one link follow each other, those over several run beside others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from overweave.hardware.machine import Machine
from overweave.schedules.moves.gather_templates import Mesh, Template
from overweave.schedules.moves.moves import MOST_LANES, After, AllToAll, Chunk, Put, ReductionStep, Sum
from overweave.schedules.synthesis.links import Shared, joined
from overweave.schedules.synthesis.search import MOST_TRANSFERS, SOON, Transfer, ends_us, gathered, traded

ELEMENT_BYTES = 2  # by which a pattern is searched; another size changes no more than its latencies
PARTS = (2, 4, 6)  # into which a piece is cut as long as its parts, on several ways, end sooner
FILLED = 0.6  # share of a link that leaves no room for another copy: there, copies of several ranks take turns


def gather_on(machine: Machine) -> Template:
    """Return the template of a gather on a machine's first GPUs. It raises InputError for too few, and MachineFileError
    for a GPU that no link reaches."""

    def synthesized(mesh: Mesh) -> Iterator[Put]:
        parts, forth = _parts(machine, mesh)
        cut, copies = replace(mesh, pieces=mesh.pieces * parts), united(forth, parts)
        turns = _Turns(machine, copies, mesh.world_size)
        for one in copies:
            owner, piece = divmod(one.chunk, cut.pieces)
            rows = cut.piece_of(owner, piece)[0], cut.piece_of(owner, piece + one.length - 1)[1]
            if rows[0] < rows[1]:
                yield turns.put(one, Chunk(rows))

    return synthesized


def scatter_on(machine: Machine) -> Callable[[Mesh], Iterator[ReductionStep]]:
    """Return the template of a reduce-scatter on a machine: `gather_on`'s mirror, and its errors."""

    def synthesized(mesh: Mesh) -> Iterator[ReductionStep]:
        back = _mirrored(_pieces(machine, mesh))
        turns, arrived = _Turns(machine, back, mesh.world_size), set[tuple[int, Chunk]]()
        for one in back:
            owner, piece = divmod(one.chunk, mesh.pieces)
            for chunk in mesh.piece(owner, piece):
                if (one.source, chunk) in arrived:
                    yield turns.sum(one.source, chunk)
                arrived.add((one.target, chunk))
                yield turns.put(one, chunk)

    return synthesized


def all_to_all_on(machine: Machine, mesh: Mesh, *, sends: bool = False) -> AllToAll:
    """Return the moves of an all-to-all on a machine. sends: of a tensor that tiles write. Raises as `gather_on`."""
    size = mesh.world_size
    served = traded(machine, size, mesh.pieces, _chunk_bytes(mesh)) if size > 1 else ()
    turns = _Turns(machine, served, size)
    moves = (
        replace(turns.put(one, chunk), mover=mesh.mover)
        for one in served
        for chunk in mesh.piece(one.target, one.chunk)
    )
    return AllToAll(size, tuple(moves), sends, mesh.copy_programs)


def _pieces(machine: Machine, mesh: Mesh) -> tuple[Transfer, ...]:
    return gathered(machine, mesh.world_size, mesh.pieces, _chunk_bytes(mesh)) if mesh.world_size > 1 else ()


def _parts(machine: Machine, mesh: Mesh) -> tuple[int, tuple[Transfer, ...]]:
    """Return into how many parts each piece is cut, and the ways of the parts: those that end first."""
    # In simulation scatters of parts are slower on two levels, so only gathers are cut further.
    size, pieces, piece_bytes = mesh.world_size, mesh.pieces, _chunk_bytes(mesh)
    parts, best = 1, _pieces(machine, mesh)
    for more in PARTS:
        if size * (size - 1) * pieces * more > MOST_TRANSFERS:
            break
        found = gathered(machine, size, pieces * more, piece_bytes // more) if size > 1 else ()
        if ends_us(found) >= ends_us(best):
            break
        parts, best = more, found
    return parts, best


def united(forth: Sequence[Transfer], parts: int) -> list[Transfer]:
    """Return the transfers with one copy for the parts of a piece that follow each other over a link: a large one is
    quicker than several. What a rank passes on before the last part of a copy has come, or has not yet when the first
    one leaves, goes alone."""
    comes_us = {(one.target, one.chunk): one.end_us for one in forth}
    leaves_us = {(one.source, one.chunk): one.begin_us for one in reversed(forth)}
    copies: list[Transfer] = []
    last: dict[tuple[int, int], int] = {}  # source, target -> the latest copy from one to the other

    def goes_on(copy: Transfer, one: Transfer) -> bool:
        is_next = copy.chunk + copy.length == one.chunk and one.chunk % parts > 0
        follows = abs(one.begin_us - copy.end_us) <= SOON
        is_there = comes_us.get((one.source, one.chunk), 0.0) <= copy.begin_us + SOON
        chunks = range(copy.chunk, one.chunk)
        wanted_us = min(leaves_us.get((one.target, chunk), one.end_us) for chunk in chunks) if is_next else 0.0
        return follows and is_there and wanted_us >= one.end_us - SOON

    for one in forth:
        at = last.setdefault((one.source, one.target), len(copies))
        if at < len(copies) and goes_on(copies[at], one):
            copies[at] = copies[at]._replace(end_us=one.end_us, length=copies[at].length + 1)
        else:
            last[one.source, one.target] = len(copies)
            copies.append(one)
    return copies


def _chunk_bytes(mesh: Mesh) -> int:
    """Return the bytes of a chunk, to a power of two: shapes that are nearly alike share a search."""
    chunk_bytes = mesh.shard_size * mesh.cols * ELEMENT_BYTES // mesh.pieces
    return 1 << max(1, chunk_bytes).bit_length() - 1


def _mirrored(forth: Sequence[Transfer]) -> list[Transfer]:
    """Return all transfers backwards in time."""
    end_us = max((one.end_us for one in forth), default=0.0)
    back = [Transfer(one.target, one.source, one.chunk, end_us - one.end_us, end_us - one.begin_us) for one in forth]
    return sorted(back, key=lambda one: (one.begin_us, one.end_us))


class _Turns:
    """Makes moves of transfers, in the order in which these begin: each in a lane of its link, and behind the copy of
    another rank that had a link before it."""

    def __init__(self, machine: Machine, transfers: Sequence[Transfer], ranks: int) -> None:
        self._routes = joined(machine, ranks).routes if ranks > 1 else {}
        self._lanes = dict(zip(transfers, self._dealt(transfers, max(MOST_LANES, ranks)), strict=True))
        self._count = [0] * ranks  # moves of each rank
        self._over: dict[Shared, list[tuple[Transfer, int]]] = {}  # link -> copies, and which move of its rank each is

    def sum(self, rank: int, chunk: Chunk) -> Sum:
        self._count[rank] += 1
        return Sum(rank, chunk)

    def put(self, one: Transfer, chunk: Chunk) -> Put:
        move = Put(one.source, one.target, chunk, self._lanes[one], self._after(one))
        self._count[one.source] += 1
        return move

    def _after(self, one: Transfer) -> After:
        found: dict[tuple[int, int], None] = {}
        for link, taken in self._routes[one.source, one.target].takes.items():
            over = self._over.setdefault(link, [])
            ended = [each for each in over if each[0].end_us <= one.begin_us + SOON] if taken > FILLED else []
            last, index = max(ended, key=lambda each: each[0].end_us, default=(one, 0))
            if last.source != one.source:
                found[last.source, index] = None
            over.append((one, self._count[one.source]))
        return tuple(found)

    def _dealt(self, transfers: Sequence[Transfer], most: int) -> Iterator[int]:
        """Yield the lane of each transfer: of those over its link, the first one that is free when it begins."""
        busy: dict[int, list[tuple[Shared, float]]] = {}  # rank -> each lane's link, and when its last copy ends
        for one in transfers:
            link, own = self._routes[one.source, one.target].leaves_by, busy.setdefault(one.source, [])
            over = [lane for lane, (used, _) in enumerate(own) if used == link]
            lane = next((lane for lane in over if own[lane][1] <= one.begin_us + SOON), len(own))
            if lane >= most:
                lane = min(over or range(most), key=lambda at: own[at][1])
            own[lane : lane + 1] = [(link, one.end_us)]
            yield lane
