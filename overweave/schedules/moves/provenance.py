"""Follow the partial sums of a reduction through its moves: what each rank has of each part of the tensor, and when.

The tensor is cut into cells at all edges of chunks and shards. For each cell a rank has a current value, at first its
own partial; values that arrive are pending until a Sum adds them. A value names its partials in the order in which they
were added. So a partial that is left out, added twice, or added in another order on two ranks is found.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from msgspec import Struct

from overweave.errors import ScheduleError
from overweave.ir.schedule import Range
from overweave.ir.shards import shard_rows
from overweave.schedules.communication import PARTIAL, RUNNING, SLOTS, TOTAL, Y, is_empty
from overweave.schedules.moves.moves import Box, Chunk, Collective, Get, Put, Reduction, Sum, check_ends

OWN = -1  # the "move" that brings a rank's own partial: its tiles

PartialSum = int | tuple["PartialSum", ...]  # a rank's partial, or the sum of such, in this order


class BufferedValue(Struct, frozen=True):
    """A value in a buffer. layer: which of several copies of that buffer (slots, or running sums). rank: the peer in
    whose buffer it is read; None: the rank's own."""

    buffer: str
    layer: int
    value: PartialSum
    rank: int | None = None


class ArrivedPart(Struct, frozen=True):
    """A value on a rank. by: the index of the move that brought it, or OWN."""

    part: BufferedValue
    by: int


class SourcedRectangle(Struct, frozen=True):
    """A rectangle of cells with the same values. by: the indices of the moves that brought them."""

    box: Box
    parts: tuple[BufferedValue, ...]
    by: tuple[int, ...]


class Carried(Struct, frozen=True):
    """A Put or Get: its sources, and the buffer that its target writes."""

    at: int
    source: int
    target: int
    pieces: tuple[SourcedRectangle, ...]
    lands: BufferedValue
    box: Box


class Added(Struct, frozen=True):
    """A Sum of the parts of each piece, and the buffer that holds the result.

    by_tiles: tiles add, so that the own part is never stored.
    """

    at: int
    rank: int
    pieces: tuple[SourcedRectangle, ...]
    kept: BufferedValue
    by_tiles: bool = False


class Provenance(Struct):
    """The traced moves of a reduction.

    done: the moves and sums in the order of the list; behind them the sums that complete a rank's result. ends: for
    each rank, the pieces of its result. read: pairs (move, rank) whose result on that rank is passed on or added again.
    together: position of a library sum in the list -> the rows of its chunks; no other move touches those rows.
    tiles_end_in: the buffer of whole sums that tiles make and every rank gets. ranks: those that are traced.
    """

    reduction: Reduction
    whole: Box
    ranks: Sequence[int]
    done: list[Carried | Added]
    ends: dict[int, tuple[SourcedRectangle, ...]]
    read: set[tuple[int, int]]
    together: dict[int, tuple[Range, ...]]
    tiles_end_in: str = Y

    def wanted(self, rank: int) -> Box:
        """Return the rows and columns of the sum that a rank must have at the end."""
        rows = shard_rows(self.whole.rows[1], self.reduction.world_size, rank)
        return self.whole if self.reduction.everywhere else Box(rows, self.whole.cols)


def partials(value: PartialSum) -> tuple[int, ...]:
    """Return the ranks whose partials a value adds, in the order of adding."""
    return (value,) if isinstance(value, int) else tuple(rank for part in value for rank in partials(part))


def trace_provenance(
    reduction: Reduction, rows: int, cols: int, tiles_end_in: str = Y, ranks: Sequence[int] = ()
) -> Provenance:
    """Trace all moves, on some ranks or on all. Raises ScheduleError if a partial is left out, added twice, or added in
    another order on two ranks."""
    return _Tracker(reduction, Box((0, rows), (0, cols)), tiles_end_in, ranks or range(reduction.world_size)).trace()


class _Grid(Struct, frozen=True):
    """The tensor's cells, between all edges of chunks and shards."""

    rows: tuple[Range, ...]
    cols: tuple[Range, ...]

    def within(self, box: Box) -> Iterator[tuple[int, list[int]]]:
        """Yield each row of cells inside a box: its index, and the indices of its columns."""
        cols = [index for index, (lo, hi) in enumerate(self.cols) if box.cols[0] <= lo < hi <= box.cols[1]]
        for index in range(bisect_left(self.rows, (box.rows[0], 0)), len(self.rows)):
            lo, hi = self.rows[index]
            if hi > box.rows[1]:
                return
            if lo < hi:
                yield index, cols

    def pieces(
        self, box: Box, held: Callable[[tuple[int, int]], list[ArrivedPart]], apart: bool
    ) -> tuple[SourcedRectangle, ...]:
        """Return the largest rectangles of cells that hold the same parts.

        apart: rows of cells whose parts were brought by other moves are not merged.
        """
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
    """The state of every (rank, cell) while moves are followed.

    current: its value. pending: values that arrived and are not added yet. arrived: how many slots are in use.
    sums: how many running sums were written. library_cells: cells that NCCL sums.
    """

    def __init__(self, reduction: Reduction, whole: Box, tiles_end_in: str, ranks: Sequence[int]) -> None:
        self.reduction, self.whole, self.size = reduction, whole, reduction.world_size
        chunks = [one for move in reduction.moves for one in _chunks(move)]
        for index, move in enumerate(reduction.moves):
            if isinstance(move, Collective):
                self._check_collective(index, move)
            else:
                self._check(index, move)
        self._check_order()
        shards = [shard_rows(whole.rows[1], self.size, rank) for rank in range(self.size)]
        self.grid = _Grid(
            _cells(whole.rows, [*(chunk.rows for chunk in chunks), *shards]),
            _cells(whole.cols, [chunk.cols for chunk in chunks if chunk.cols]),
        )
        cells = [(line, col) for line, cols in self.grid.within(whole) for col in cols]
        self.ranks, self.followed = ranks, frozenset(ranks if len(ranks) < self.size else ())
        self.current = {
            (rank, cell): ArrivedPart(BufferedValue(PARTIAL, 0, rank), OWN) for rank in ranks for cell in cells
        }
        # Of each traced rank what the library carries for it, and the ranks with which that joins it.
        self.columns: dict[int, tuple[int, ...]] = {}
        self.sent: dict[int, list[int]] = {rank: [] for rank in self.followed}
        for index, move in enumerate(reduction.moves if self.followed else ()):
            if isinstance(move, Put) and move.among and move.rank in self.followed:
                self.columns[move.rank] = move.among
                self.sent[move.rank].append(index)
        self.pending: dict[tuple[int, tuple[int, int]], list[ArrivedPart]] = {}
        self.arrived: dict[tuple[int, tuple[int, int]], int] = {}
        self.sums: dict[tuple[int, tuple[int, int]], int] = {}
        self.library_cells: set[tuple[int, int]] = set()
        self.provenance = Provenance(reduction, whole, ranks, [], {}, set(), {}, tiles_end_in)

    def trace(self) -> Provenance:
        # A group of one adds nothing: its tiles write the result.
        for index, move in enumerate(self.reduction.moves if self.size > 1 else ()):
            if isinstance(move, Sum):
                self._add(index, move.rank, self._box(move.chunk), move)
            elif isinstance(move, Collective):
                self._assign_to_library(index, move)
            else:
                self._transfer(index, move)
        for rank in self.ranks:
            self._finish(rank)
        self._check_same_order()
        return self.provenance

    def _check(self, index: int, move: Put | Get | Sum) -> None:
        asked = f"move {index} of a reduction of {self.whole} on {self.size} ranks"
        if not isinstance(move, Sum):
            check_ends(asked, move, self.size)
        elif move.rank not in range(self.size):
            raise ScheduleError(asked, f"it is one of rank {move.rank}", "Name a rank of the group")
        box = self._box(move.chunk)
        if box.common(self.whole) != box or not box.area:
            found = f"chunk {move.chunk} is empty, or not inside the tensor"
            raise ScheduleError(asked, found, "Name rows and columns of it")

    def _check_collective(self, index: int, move: Collective) -> None:
        asked = f"move {index} of a reduction of {self.whole} on {self.size} ranks"
        shards = [shard_rows(self.whole.rows[1], self.size, rank) for rank in range(self.size)]
        within = [self.whole.rows] * len(move.chunks) if self.reduction.everywhere else shards
        inside = (lo <= one.rows[0] <= one.rows[1] <= hi for (lo, hi), one in zip(within, move.chunks, strict=False))
        is_whole = all((one.cols or self.whole.cols) == self.whole.cols for one in move.chunks)
        if len(move.chunks) != len(within) or not all(inside) or not is_whole:
            found, cure = "its chunks are not one of each rank's shard, whole rows of it", "Give one for each rank"
            if self.reduction.everywhere:
                found, cure = "its chunks are not whole rows of it", "Name whole rows"
            raise ScheduleError(asked, found, cure)

    def _check_order(self) -> None:
        """Raise ScheduleError if a move names a library sum in `after`, or a library sum has an `after`."""
        moves, places = self.reduction.moves, self.reduction.places()
        for index, move in enumerate(moves):
            named = [moves[places.get(one, index)] for one in move.after]
            if named and any(isinstance(one, Collective) for one in (move, *named)):
                asked = f"move {index} of a reduction of {self.whole} after {move.after}"
                raise ScheduleError(asked, "the library sums behind all else", "Leave `after` out")

    def _assign_to_library(self, index: int, move: Collective) -> None:
        """Leave rows to NCCL. Raises ScheduleError unless every rank has its own partial of them and nothing else."""
        cells = [cell for chunk in move.chunks for cell in self._cells(self._box(chunk))]
        for rank, cell in ((rank, cell) for rank in self.ranks for cell in cells):
            if self.current[rank, cell].by != OWN or self.pending.get((rank, cell)) or cell in self.library_cells:
                found = f"another move carries rows [{self.grid.rows[cell[0]][0]}:{self.grid.rows[cell[0]][1]}] of it"
                raise ScheduleError(f"move {index}: leave a sum to the library", found, "Leave it all of those rows")
        self.library_cells.update(cells)
        self.provenance.together[index] = tuple(chunk.rows for chunk in move.chunks)

    def _check_not_by_library(self, asked: str, cells: list[tuple[int, int]]) -> None:
        if not self.library_cells.isdisjoint(cells):
            raise ScheduleError(asked, "an earlier move leaves some of it to the library", "Let one of them carry it")

    def _box(self, chunk: Chunk) -> Box:
        return Box(chunk.rows, chunk.cols or self.whole.cols)

    def _cells(self, box: Box) -> list[tuple[int, int]]:
        return [(line, col) for line, cols in self.grid.within(box) for col in cols]

    def _is_whole(self, value: PartialSum) -> bool:
        return len(partials(value)) == self.size

    def _transfer(self, index: int, move: Put | Get) -> None:
        source, target = (move.rank, move.peer) if isinstance(move, Put) else (move.peer, move.rank)
        box = self._box(move.chunk)
        cells = self._cells(box)
        self._check_not_by_library(f"move {index}: pass on {box}", cells)
        if isinstance(move, Put) and self.followed and not {source, target} <= self.followed:
            self._transfer_between_parts(index, move, box)
            return
        values = {self.current[source, cell].part.value for cell in cells}
        if len(values) > 1:
            found = f"rank {source} has {' and '.join(sorted(map(str, values)))} of it"
            raise ScheduleError(f"move {index}: pass on {box}", found, "Let a move carry what was added alike")
        (value,) = values
        pieces = self.grid.pieces(box, lambda cell: [self.current[source, cell]], apart=False)
        self.provenance.read |= {(self.current[source, cell].by, source) for cell in cells}
        if isinstance(move, Get) and move.in_place:
            lands = BufferedValue(PARTIAL, 0, value, source)
            if value != source:
                found = f"rank {source} has a sum of it"
                raise ScheduleError(f"move {index}: read {box} in place", found, "Move sums: partials alone stay")
            for cell in cells:
                self._add_pending(index, target, cell, ArrivedPart(lands, index))
        elif self._is_whole(value):
            lands = BufferedValue(TOTAL, 0, value)
            for cell in cells:
                self._replace(index, target, cell, ArrivedPart(lands, index))
        else:
            adds = isinstance(move, Put) and move.adds  # what is added as it arrives has one slot
            layer = 0 if adds else max(self.arrived.get((target, cell), 0) for cell in cells)
            lands = BufferedValue(SLOTS, layer, value)
            for cell in cells:
                self._add_pending(index, target, cell, ArrivedPart(lands, index))
        self.provenance.done.append(Carried(index, source, target, pieces, lands, box))

    def _transfer_between_parts(self, index: int, move: Put, box: Box) -> None:
        """Follow what the library carries between a rank that is traced and another one. That sends what its twin, the
        traced rank of its column, sends in the same call, of the ranks of its own island."""
        cells, twin = self._cells(box), move.peer if move.peer in self.followed else move.rank
        if twin == move.rank:
            (value,) = {self.current[twin, cell].part.value for cell in cells}
            pieces = self.grid.pieces(box, lambda cell: [self.current[twin, cell]], apart=False)
            self.provenance.read |= {(self.current[twin, cell].by, twin) for cell in cells}
        else:
            value = self._sent_alike(index, move)
            pieces = (SourcedRectangle(box, (BufferedValue(TOTAL, 0, value),), ()),)
        kind = TOTAL if self._is_whole(value) else SLOTS
        layer = 0
        if twin == move.peer and kind == SLOTS:
            layer = max(self.arrived.get((twin, cell), 0) for cell in cells)
        lands = BufferedValue(kind, layer, value)
        for cell in cells if twin == move.peer else ():
            take = self._add_pending if kind == SLOTS else self._replace
            take(index, twin, cell, ArrivedPart(lands, index))
        self.provenance.done.append(Carried(index, move.rank, move.peer, pieces, lands, box))

    def _sent_alike(self, index: int, move: Put) -> PartialSum:
        """Return what a rank that is not traced sends. Raises ScheduleError if its twin sends nothing then."""
        own = self.sent[move.peer]
        if not own or not move.among:
            found = f"rank {move.peer}, which gets it, sends nothing alike"
            raise ScheduleError(f"move {index}: follow some ranks alone", found, "Ask for all ranks")
        around = own[max(0, bisect_left(own, index) - 1) :][:2]
        sent = self.reduction.moves[min(around, key=lambda at: abs(at - index))]
        assert isinstance(sent, Put)
        line, cols = next(self.grid.within(self._box(sent.chunk)))
        value = self.current[move.peer, (line, cols[0])].part.value
        return value if self._is_whole(value) else self._in_island_of(move, value)

    def _in_island_of(self, move: Put, value: PartialSum) -> PartialSum:
        """Return a value with the ranks of its sender's island in place of those that are traced."""
        if isinstance(value, tuple):
            return tuple(self._in_island_of(move, part) for part in value)
        return self.columns[value][move.among.index(move.rank)]

    def _replace(self, index: int, target: int, cell: tuple[int, int], held: ArrivedPart) -> None:
        if self._is_whole(self.current[target, cell].part.value) or self.pending.get((target, cell)):
            found = f"rank {target} has it already, or addends that it has not used"
            raise ScheduleError(f"move {index}: bring a sum to rank {target}", found, "Bring every sum once")
        self.current[target, cell] = held

    def _add_pending(self, index: int, target: int, cell: tuple[int, int], held: ArrivedPart) -> None:
        addends = self.pending.setdefault((target, cell), [])
        known = {rank for one in (self.current[target, cell], *addends) for rank in partials(one.part.value)}
        twice = known.intersection(partials(held.part.value))
        if twice:
            found = f"rank {target} has that of rank {min(twice)} already"
            raise ScheduleError(f"move {index}: bring partials to rank {target}", found, "Let each be added once")
        addends.append(held)
        self.arrived[target, cell] = held.part.layer + 1

    def _addends(self, rank: int, cell: tuple[int, int], own_last: bool = False) -> list[ArrivedPart]:
        addends = [self.current[rank, cell], *self.pending.get((rank, cell), ())]
        return sorted(addends, key=lambda one: (own_last and one.by == OWN, min(partials(one.part.value))))

    def _add(self, index: int, rank: int, box: Box, asked: Sum | None = None) -> None:
        """asked: the sum as the list has it; None of what is left at the end, in as many sums as moves have brought."""
        by_tiles, own_last = asked is not None and asked.by == "tiles", asked is not None and asked.own_last
        cells = self._cells(box)
        if not all(self.pending.get((rank, cell)) for cell in cells):
            found = f"nothing has arrived there for all of {box}"
            raise ScheduleError(f"move {index}: add on rank {rank}", found, "Put what brings the addends first")
        pieces = self.grid.pieces(box, lambda cell: self._addends(rank, cell, own_last), apart=asked is None)
        values = {tuple(part.value for part in piece.parts) for piece in pieces}
        if len(values) > 1:
            found = f"of some of it {' and '.join(sorted(map(str, values)))} are here"
            raise ScheduleError(f"move {index}: add {box} on rank {rank}", found, "Let a sum have the same addends")
        (value,) = values
        is_whole = self._is_whole(value)
        layer = 0 if is_whole else max(self.sums.get((rank, cell), 0) for cell in cells)
        ends_in = (self.provenance.tiles_end_in, PARTIAL) if by_tiles else (TOTAL, RUNNING)
        kept = BufferedValue(ends_in[0] if is_whole else ends_in[1], 0 if by_tiles else layer, value)
        for cell in cells:
            addends = self._addends(rank, cell, own_last)
            self.provenance.read |= {(one.by, rank) for one in addends}
            self.current[rank, cell], self.pending[rank, cell] = ArrivedPart(kept, index), []
            self.sums[rank, cell] = layer + 1
        self.provenance.done.append(Added(index, rank, pieces, kept, by_tiles))

    def _finish(self, rank: int) -> None:
        """Add what is still pending on a rank. Raises ScheduleError if its result lacks a partial."""
        wanted = self.provenance.wanted(rank)
        left = {cell: addends for (one, cell), addends in self.pending.items() if one == rank and addends}
        strange = [cell for cell in left if not Box(self.grid.rows[cell[0]], self.whole.cols).common(wanted).area]
        if strange:
            line = self.grid.rows[strange[0][0]]
            found = f"what arrives for rows [{line[0]}:{line[1]}] is never added, and nothing of rank {rank}'s result"
            raise ScheduleError(f"reduce {self.whole}", found, "Add a Sum, and pass it on")
        for index, piece in self._missing_sums(rank, wanted, left):
            self._add(index, rank, piece.box)
        for cell in (one for one in self._cells(wanted) if one not in self.library_cells):
            lacks = sorted(set(range(self.size)).difference(partials(self.current[rank, cell].part.value)))
            if lacks:
                line = self.grid.rows[cell[0]]
                found = f"rank {rank} lacks the partials of ranks {lacks} for rows [{line[0]}:{line[1]}] at the end"
                raise ScheduleError(f"reduce {self.whole}", found, "Every rank's partial must come to every sum")
        ends = self.grid.pieces(
            wanted, lambda cell: [] if cell in self.library_cells else [self.current[rank, cell]], apart=True
        )
        self.provenance.ends[rank] = tuple(sorted((one for one in ends if one.parts), key=lambda piece: piece.by))

    def _missing_sums(
        self, rank: int, wanted: Box, left: dict[tuple[int, int], list[ArrivedPart]]
    ) -> Iterator[tuple[int, SourcedRectangle]]:
        """Return the sums that complete a result, numbered behind all moves, by the arrival of their last addend."""
        pieces = self.grid.pieces(wanted, lambda cell: self._addends(rank, cell) if left.get(cell) else [], apart=True)
        some = sorted((piece for piece in pieces if piece.parts), key=lambda piece: piece.by[-1])
        first = len(self.reduction.moves) + sum(isinstance(one, Added) for one in self.provenance.done)
        return ((first + index, piece) for index, piece in enumerate(some))

    def _check_same_order(self) -> None:
        """Raise ScheduleError if two ranks would have different bits of one sum: each must add it in one order, or get
        it from one rank."""
        for line, cols in self.grid.within(self.whole) if self.reduction.everywhere else ():
            for col in (one for one in cols if (line, one) not in self.library_cells):
                values = {self.current[rank, (line, col)].part.value for rank in self.ranks}
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
