"""What every rank holds of each part of a tensor while chunks of it are passed on and added up.

The tensor is cut at all edges of chunks and shards. Every rank has a part's value, of which its own partial is the
first; what arrives lies beside until it is added. Values remember in which order they were added, so that it is known
what is left out, added twice, or added differently on two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from msgspec import Struct

from overweave.errors import ScheduleError
from overweave.ir.schedule import Range
from overweave.ir.shards import shard_rows
from overweave.schedules.communication import PARTIAL, RUNNING, SLOTS, TOTAL, Y, is_empty
from overweave.schedules.moves.back_ends import check_ends
from overweave.schedules.moves.moves import Box, Chunk, Collective, Get, Put, Reduction, Sum

OWN = -1  # stands for the rank's tiles among the moves that bring something

PartialSum = int | tuple["PartialSum", ...]  # a rank's partial, or the sum of such, in this order


class BufferedValue(Struct, frozen=True):
    """A value in a buffer. layer: which of several buffers, or of several places for what arrives."""

    buffer: str
    layer: int
    value: PartialSum


class ArrivedPart(Struct, frozen=True):
    """by: the move that has brought it."""

    part: BufferedValue
    by: int


class SourcedRectangle(Struct, frozen=True):
    """A rectangle in which all that is asked for is the same. by: the moves that brought it."""

    box: Box
    parts: tuple[BufferedValue, ...]
    by: tuple[int, ...]


class Carried(Struct, frozen=True):
    """A Put or Get, its sources, and where it lands."""

    at: int
    source: int
    target: int
    pieces: tuple[SourcedRectangle, ...]
    lands: BufferedValue
    box: Box


class Added(Struct, frozen=True):
    """A Sum of each piece's parts, and where it is kept. by_tiles: the own part is none that is ever stored."""

    at: int
    rank: int
    pieces: tuple[SourcedRectangle, ...]
    kept: BufferedValue
    by_tiles: bool = False


class Provenance(Struct):
    """Where every value of a reduction comes from.

    done: the moves and sums in the order of the list; behind them the sums that complete a rank's result. ends: for
    each rank, the pieces of its result. read: pairs (move, rank) whose result on that rank is passed on or added again.
    together: position of a library sum in the list -> the rows of each rank's shard that it sums; no other move touches
    those rows. tiles_end_in: the buffer of whole sums that tiles make and every rank gets.
    """

    reduction: Reduction
    whole: Box
    done: list[Carried | Added]
    ends: list[tuple[SourcedRectangle, ...]]
    read: set[tuple[int, int]]
    together: dict[int, tuple[Range, ...]]
    tiles_end_in: str = Y

    def wanted(self, rank: int) -> Box:
        """What a rank is to have at the end."""
        rows = shard_rows(self.whole.rows[1], self.reduction.world_size, rank)
        return self.whole if self.reduction.everywhere else Box(rows, self.whole.cols)


def partials(value: PartialSum) -> tuple[int, ...]:
    """The ranks whose partials a value is the sum of, in its order."""
    return (value,) if isinstance(value, int) else tuple(rank for part in value for rank in partials(part))


def trace_provenance(reduction: Reduction, rows: int, cols: int, tiles_end_in: str = Y) -> Provenance:
    """Follows all moves. Raises ScheduleError for what is left out, added twice, or differently on two ranks."""
    return _Tracker(reduction, Box((0, rows), (0, cols)), tiles_end_in).kept()


class _Grid(Struct, frozen=True):
    """The tensor's cells, between all edges of chunks and shards."""

    rows: tuple[Range, ...]
    cols: tuple[Range, ...]

    def within(self, box: Box) -> Iterator[tuple[int, list[int]]]:
        """For each of its lines of cells, their columns."""
        cols = [at for at, (lo, hi) in enumerate(self.cols) if box.cols[0] <= lo < hi <= box.cols[1]]
        for at, (lo, hi) in enumerate(self.rows):
            if box.rows[0] <= lo < hi <= box.rows[1]:
                yield at, cols

    def pieces(
        self, box: Box, held: Callable[[tuple[int, int]], list[ArrivedPart]], apart: bool
    ) -> tuple[SourcedRectangle, ...]:
        """Its largest pieces with the same parts. apart: also brought by the same moves, line by line."""
        found: list[tuple[Range, list[tuple[Range, tuple[BufferedValue, ...]]], list[set[int]]]] = []
        for line, cols in self.within(box):
            runs: list[tuple[Range, tuple[BufferedValue, ...]]] = []
            bringers: list[set[int]] = []
            for col in cols:
                known = held((line, col))
                parts, span = tuple(one.part for one in known), self.cols[col]
                if runs and runs[-1][1] == parts:
                    runs[-1] = ((runs[-1][0][0], span[1]), parts)
                    bringers[-1] |= {one.by for one in known}
                else:
                    runs.append((span, parts))
                    bringers.append({one.by for one in known})
            if found and found[-1][1] == runs and (not apart or found[-1][2] == bringers):
                above, _, before = found[-1]
                merged = [one | other for one, other in zip(before, bringers, strict=True)]
                found[-1] = ((above[0], self.rows[line][1]), runs, merged)
            else:
                found.append((self.rows[line], runs, bringers))
        return tuple(
            SourcedRectangle(Box(span, cols_of), parts, tuple(sorted(by)))
            for span, runs, bringers in found
            for (cols_of, parts), by in zip(runs, bringers, strict=True)
        )


class _Tracker:
    """Every rank's cells: what it has, what lies beside it, and how often something has arrived there."""

    def __init__(self, reduction: Reduction, whole: Box, tiles_end_in: str) -> None:
        self.reduction, self.whole, self.size = reduction, whole, reduction.world_size
        chunks = [one for move in reduction.moves for one in _chunks(move)]
        for at, move in enumerate(reduction.moves):
            if isinstance(move, Collective):
                self._check_together(at, move)
            else:
                self._check(at, move)
        self._check_order()
        shards = [shard_rows(whole.rows[1], self.size, rank) for rank in range(self.size)]
        self.grid = _Grid(
            _cells(whole.rows, [*(chunk.rows for chunk in chunks), *shards]),
            _cells(whole.cols, [chunk.cols for chunk in chunks if chunk.cols]),
        )
        cells = [(line, col) for line, cols in self.grid.within(whole) for col in cols]
        ranks = range(self.size)
        self.has = {(rank, cell): ArrivedPart(BufferedValue(PARTIAL, 0, rank), OWN) for rank in ranks for cell in cells}
        self.beside: dict[tuple[int, tuple[int, int]], list[ArrivedPart]] = {}
        self.arrived: dict[tuple[int, tuple[int, int]], int] = {}
        self.sums: dict[tuple[int, tuple[int, int]], int] = {}
        self.librarys: set[tuple[int, int]] = set()
        self.provenance = Provenance(reduction, whole, [], [], set(), {}, tiles_end_in)

    def kept(self) -> Provenance:
        # A group of one has nothing to add, and nothing for the library to sum: its tiles write the result.
        for at, move in enumerate(self.reduction.moves if self.size > 1 else ()):
            if isinstance(move, Sum):
                self._add(at, move.rank, self._box(move.chunk), move)
            elif isinstance(move, Collective):
                self._leave(at, move)
            else:
                self._carry(at, move)
        for rank in range(self.size):
            self._end(rank)
        self._check_alike()
        return self.provenance

    def _check(self, at: int, move: Put | Get | Sum) -> None:
        asked = f"move {at} of a reduction of {self.whole} on {self.size} ranks"
        if not isinstance(move, Sum):
            check_ends(asked, move, self.size)
        elif move.rank not in range(self.size):
            raise ScheduleError(asked, f"it is one of rank {move.rank}", "Name a rank of the group")
        box = self._box(move.chunk)
        if box.common(self.whole) != box or not box.area:
            found = f"chunk {move.chunk} is empty, or not inside the tensor"
            raise ScheduleError(asked, found, "Name rows and columns of it")

    def _check_together(self, at: int, move: Collective) -> None:
        asked = f"move {at} of a reduction of {self.whole} on {self.size} ranks"
        shards = [shard_rows(self.whole.rows[1], self.size, rank) for rank in range(self.size)]
        inside = (lo <= one.rows[0] <= one.rows[1] <= hi for (lo, hi), one in zip(shards, move.chunks, strict=False))
        is_whole = all((one.cols or self.whole.cols) == self.whole.cols for one in move.chunks)
        if len(move.chunks) != self.size or not all(inside) or not is_whole:
            found = "its chunks are not one of each rank's shard, whole rows of it"
            raise ScheduleError(asked, found, "Give one for each rank")

    def _check_order(self) -> None:
        """Nothing is asked to come after what the library sums, nor that to come after anything."""
        moves, places = self.reduction.moves, self.reduction.places()
        for at, move in enumerate(moves):
            named = [moves[places.get(one, at)] for one in move.after]
            if named and any(isinstance(one, Collective) for one in (move, *named)):
                asked = f"move {at} of a reduction of {self.whole} after {move.after}"
                raise ScheduleError(asked, "the library sums behind all else", "Leave `after` out")

    def _leave(self, at: int, move: Collective) -> None:
        """To the library: rows of which every rank has its own partial, and no other."""
        cells = [cell for chunk in move.chunks for cell in self._cells(self._box(chunk))]
        for rank, cell in ((rank, cell) for rank in range(self.size) for cell in cells):
            if self.has[rank, cell].by != OWN or self.beside.get((rank, cell)) or cell in self.librarys:
                found = f"another move carries rows [{self.grid.rows[cell[0]][0]}:{self.grid.rows[cell[0]][1]}] of it"
                raise ScheduleError(f"move {at}: leave a sum to the library", found, "Leave it all of those rows")
        self.librarys.update(cells)
        self.provenance.together[at] = tuple(chunk.rows for chunk in move.chunks)

    def _check_not_left(self, asked: str, cells: list[tuple[int, int]]) -> None:
        if not self.librarys.isdisjoint(cells):
            raise ScheduleError(asked, "an earlier move leaves some of it to the library", "Let one of them carry it")

    def _box(self, chunk: Chunk) -> Box:
        return Box(chunk.rows, chunk.cols or self.whole.cols)

    def _cells(self, box: Box) -> list[tuple[int, int]]:
        return [(line, col) for line, cols in self.grid.within(box) for col in cols]

    def _is_whole(self, value: PartialSum) -> bool:
        return len(partials(value)) == self.size

    def _carry(self, at: int, move: Put | Get) -> None:
        source, target = (move.rank, move.peer) if isinstance(move, Put) else (move.peer, move.rank)
        box = self._box(move.chunk)
        cells = self._cells(box)
        self._check_not_left(f"move {at}: pass on {box}", cells)
        values = {self.has[source, cell].part.value for cell in cells}
        if len(values) > 1:
            found = f"rank {source} has {' and '.join(sorted(map(str, values)))} of it"
            raise ScheduleError(f"move {at}: pass on {box}", found, "Let a move carry what was added alike")
        (value,) = values
        pieces = self.grid.pieces(box, lambda cell: [self.has[source, cell]], apart=False)
        self.provenance.read |= {(self.has[source, cell].by, source) for cell in cells}
        if self._is_whole(value):
            lands = BufferedValue(TOTAL, 0, value)
            for cell in cells:
                self._replace(at, target, cell, ArrivedPart(lands, at))
        else:
            lands = BufferedValue(SLOTS, max(self.arrived.get((target, cell), 0) for cell in cells), value)
            for cell in cells:
                self._put_beside(at, target, cell, ArrivedPart(lands, at))
        self.provenance.done.append(Carried(at, source, target, pieces, lands, box))

    def _replace(self, at: int, target: int, cell: tuple[int, int], held: ArrivedPart) -> None:
        if self._is_whole(self.has[target, cell].part.value) or self.beside.get((target, cell)):
            found = f"rank {target} has it already, or addends that it has not used"
            raise ScheduleError(f"move {at}: bring a sum to rank {target}", found, "Bring every sum once")
        self.has[target, cell] = held

    def _put_beside(self, at: int, target: int, cell: tuple[int, int], held: ArrivedPart) -> None:
        beside = self.beside.setdefault((target, cell), [])
        known = {rank for one in (self.has[target, cell], *beside) for rank in partials(one.part.value)}
        twice = known.intersection(partials(held.part.value))
        if twice:
            found = f"rank {target} has that of rank {min(twice)} already"
            raise ScheduleError(f"move {at}: bring partials to rank {target}", found, "Let each be added once")
        beside.append(held)
        self.arrived[target, cell] = held.part.layer + 1

    def _addends(self, rank: int, cell: tuple[int, int], own_last: bool = False) -> list[ArrivedPart]:
        addends = [self.has[rank, cell], *self.beside.get((rank, cell), ())]
        return sorted(addends, key=lambda one: (own_last and one.by == OWN, min(partials(one.part.value))))

    def _add(self, at: int, rank: int, box: Box, asked: Sum | None = None) -> None:
        """asked: the sum as the list has it; None of what is left at the end, in as many sums as moves have brought."""
        by_tiles, own_last = asked is not None and asked.by == "tiles", asked is not None and asked.own_last
        cells = self._cells(box)
        if not all(self.beside.get((rank, cell)) for cell in cells):
            found = f"nothing has arrived there for all of {box}"
            raise ScheduleError(f"move {at}: add on rank {rank}", found, "Put what brings the addends first")
        pieces = self.grid.pieces(box, lambda cell: self._addends(rank, cell, own_last), apart=asked is None)
        values = {tuple(part.value for part in piece.parts) for piece in pieces}
        if len(values) > 1:
            found = f"of some of it {' and '.join(sorted(map(str, values)))} are here"
            raise ScheduleError(f"move {at}: add {box} on rank {rank}", found, "Let a sum have the same addends")
        (value,) = values
        is_whole = self._is_whole(value)
        layer = 0 if is_whole else max(self.sums.get((rank, cell), 0) for cell in cells)
        ends_in = (self.provenance.tiles_end_in, PARTIAL) if by_tiles else (TOTAL, RUNNING)
        kept = BufferedValue(ends_in[0] if is_whole else ends_in[1], 0 if by_tiles else layer, value)
        for cell in cells:
            addends = self._addends(rank, cell, own_last)
            self.provenance.read |= {(one.by, rank) for one in addends}
            self.has[rank, cell], self.beside[rank, cell] = ArrivedPart(kept, at), []
            self.sums[rank, cell] = layer + 1
        self.provenance.done.append(Added(at, rank, pieces, kept, by_tiles))

    def _end(self, rank: int) -> None:
        """Adds what is left, and holds a rank to what it is to have."""
        wanted = self.provenance.wanted(rank)
        left = {cell: beside for (one, cell), beside in self.beside.items() if one == rank and beside}
        strange = [cell for cell in left if not Box(self.grid.rows[cell[0]], self.whole.cols).common(wanted).area]
        if strange:
            line = self.grid.rows[strange[0][0]]
            found = f"what arrives for rows [{line[0]}:{line[1]}] is never added, and nothing of rank {rank}'s result"
            raise ScheduleError(f"reduce {self.whole}", found, "Add a Sum, and pass it on")
        for at, piece in self._at_the_end(rank, wanted, left):
            self._add(at, rank, piece.box)
        for cell in (one for one in self._cells(wanted) if one not in self.librarys):
            lacks = sorted(set(range(self.size)).difference(partials(self.has[rank, cell].part.value)))
            if lacks:
                line = self.grid.rows[cell[0]]
                found = f"rank {rank} lacks the partials of ranks {lacks} for rows [{line[0]}:{line[1]}] at the end"
                raise ScheduleError(f"reduce {self.whole}", found, "Every rank's partial must come to every sum")
        ends = self.grid.pieces(
            wanted, lambda cell: [] if cell in self.librarys else [self.has[rank, cell]], apart=True
        )
        self.provenance.ends.append(tuple(sorted((one for one in ends if one.parts), key=lambda piece: piece.by)))

    def _at_the_end(
        self, rank: int, wanted: Box, left: dict[tuple[int, int], list[ArrivedPart]]
    ) -> Iterator[tuple[int, SourcedRectangle]]:
        """What is still to be added, in the order in which its last addend arrives, numbered behind all moves."""
        pieces = self.grid.pieces(wanted, lambda cell: self._addends(rank, cell) if left.get(cell) else [], apart=True)
        some = sorted((piece for piece in pieces if piece.parts), key=lambda piece: piece.by[-1])
        first = len(self.reduction.moves) + sum(isinstance(one, Added) for one in self.provenance.done)
        return ((first + index, piece) for index, piece in enumerate(some))

    def _check_alike(self) -> None:
        """Where several ranks have a sum they have its bits: that is, added it alike, or got it from one of them."""
        for line, cols in self.grid.within(self.whole) if self.reduction.everywhere else ():
            for col in (one for one in cols if (line, one) not in self.librarys):
                values = {self.has[rank, (line, col)].part.value for rank in range(self.size)}
                if len(values) > 1:
                    lo, hi = self.grid.rows[line]
                    found = f"rows [{lo}:{hi}] are {' on some ranks, '.join(sorted(map(str, values)))} on others"
                    cure = "Let every rank add in one order, or share one rank's sum"
                    raise ScheduleError(f"reduce {self.whole} everywhere", found, cure)


def _cells(whole: Range, ranges: list[Range]) -> tuple[Range, ...]:
    edges = {edge for pair in (whole, *ranges) for edge in pair}
    return tuple(pair for pair in pairwise(sorted(edges)) if not is_empty(pair))


def _chunks(move: Put | Get | Sum | Collective) -> tuple[Chunk, ...]:
    return move.chunks if isinstance(move, Collective) else (move.chunk,)
