"""Turn a list of moves without sums into operations: all-gathers and all-to-alls, before or behind a matmul.

Before a matmul, its tiles read the caller's rows and the rows that arrive, in chunks that arrive together. Behind a
matmul, its tiles write the rows that are sent, in the order of sending, and the rows that arrive are copied to the
caller. A rank whose own rows peers read first copies them to symmetric memory. NCCL's collectives run on the caller's
stream; they also place a rank's own part where its tiles read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError, ScheduleError
from overweave.ir.contract import GATHERED_OUT
from overweave.ir.schedule import Buffer, Copy, Get, Goal, InitialContents, Operation, Put, Range, Region
from overweave.ir.schedule import Collective as LibraryCollective
from overweave.ir.shards import owned_rows, rows_of
from overweave.ir.tensors import all_to_all_result
from overweave.schedules.communication import (
    GATHERED,
    MAIN,
    A,
    Communication,
    MatmulChunk,
    X,
    Y,
    common,
    communicated,
    is_empty,
    region,
    shifted,
    united,
)
from overweave.schedules.moves import moves as chunks
from overweave.schedules.moves.library_calls import launched_by, library_calls, part_of
from overweave.schedules.moves.moves import (
    AllToAll,
    Box,
    Gather,
    GatherMove,
    RankRows,
    check_ends,
    earlier,
    move_obstacle,
    queue_of,
    several_lanes,
)
from overweave.schedules.moves.passing import PassedRows

OWN = "own"  # the buffer that tiles write
PRESENT = -1  # the arrival of rows that are there before tiles begin; rows that arrive later have the index of a move


def transferred(
    written: Gather | AllToAll,
    rows: int,
    cols: int,
    *,
    sends: bool = False,
    returns_gathered: bool = False,
    only: Sequence[int] = (),
) -> Communication:
    """Return the operations of the moves of a tensor `[rows, cols]`, with a `MatmulChunk` for each part of it that the
    matmul reads or writes by itself.

    sends: the matmul writes the rows that move; else it reads them. returns_gathered: the whole tensor is copied to
    output `gathered_out` at the end. only: as of a Split. Raises ScheduleError for moves that read rows which are not
    there, bring rows twice, or leave rows out.
    """
    written = written.of_ranks(only or range(written.world_size))
    geometry = Traded(written, rows, cols) if isinstance(written, AllToAll) else Gathered(written, rows, cols)
    out = Buffer(GATHERED_OUT if returns_gathered else Y, rows, cols, "output")
    transfers = _Transfers(written, geometry, out if sends or returns_gathered else None, sends, only)
    ranks = transfers.ranks if rows else ()
    steps = [step for rank in ranks for step in transfers.of_rank(rank)]
    communication = communicated(
        written.world_size,
        steps,
        [one for one in (None if sends else transfers.own, transfers.out) if one],
        given=(given for rank in ranks if not sends for given in geometry.given(rank)),
        goal=(
            Goal(region(transfers.out, rank, (0, rows)), geometry.tensor(rank), 0, 0) for rank in ranks if transfers.out
        ),
        tiles_read=not sends,
    )
    return replace(communication, behind=transfers.behind)


class _ReadRows(NamedTuple):
    """Rows that a rank's tiles read as one chunk. arrival: the index of the last move that brings any of them, or
    PRESENT."""

    arrival: int
    rows: Range
    region: Region
    name: str


class _Transfers:
    """The operations of one list of moves of one tensor.

    own: the buffer that holds a rank's rows at the start, or that its tiles write. landed: the symmetric buffer that
    rows arrive in and peers read from. out: the caller's buffer for the whole tensor, if it is wanted. held: the rows
    that each rank has. staged: ranks that copy own rows to `landed` first. from_own: moves that read `own`.
    behind: step -> the regions that must be written before it, beside those that it reads. calls: of the library,
    beside the tiles, by the position of their first move. passed: rows that lie on a rank between two moves.
    """

    def __init__(
        self,
        written: Gather | AllToAll,
        layout: Gathered | Traded,
        out: Buffer | None,
        sends: bool,
        only: Sequence[int] = (),
    ) -> None:
        self.written, self.layout, self.out, self.sends, self.size = written, layout, out, sends, written.world_size
        self.ranks = only or range(self.size)
        self.whole = Box((0, layout.rows), (0, layout.cols))
        self.held = [RankRows(rank, layout.owned(rank), self.whole.cols) for rank in range(self.size)]
        self.places, self.has_lanes = written.places(), several_lanes(written)
        self.calls = library_calls(written)
        self.behind: dict[str, tuple[Region, ...]] = {}
        self.staged: set[int] = set()
        self.passed = PassedRows()
        self.collectives = [one for one in written.moves if isinstance(one, chunks.Collective)]
        has_only_collectives = len(self.collectives) == len(written.moves)
        self.from_own = {index for index, move in enumerate(written.moves) if self._check(index, move)}
        for rank in self.ranks:
            self.held[rank].check_whole(self.whole)
        self.own = Buffer(OWN if sends else X, max(map(layout.extent, range(self.size))), layout.cols, "input")
        self.landed = Buffer(GATHERED, layout.rows, layout.cols, "symmetric")
        if out and sends and (has_only_collectives or self.size == 1):
            self.landed = out  # NCCL writes the caller's buffer itself
        self.owners = sorted((rows, one.rank) for one in self.held for rows in one.owned if not is_empty(rows))

    def of_rank(self, rank: int) -> Iterator[Operation | MatmulChunk]:
        """Yield the operations of a rank in the order of their launch."""
        yield from self._produced_chunks(rank) if self.sends else ()
        yield from self._staged(rank)
        numbers: Counter[int] = Counter()  # peer -> how many moves this rank has made with it
        for index in launched_by(self.written, self.calls, rank):
            move = self.written.moves[index]
            if index in self.calls:
                call = self.calls[index]
                yield self._with_behind(call.puts.values(), part_of(call, rank, index, self._ends, self._nothing(rank)))
            elif isinstance(move, chunks.Collective):
                yield self._with_behind((index,), self._collective(index, move, rank))
            else:
                yield self._with_behind((index,), self._move(index, move, numbers[move.peer]))
                numbers[move.peer] += 1
        yield from () if self.sends else self._consumed_chunks(rank)
        if self.out and self.landed != self.out:
            yield self._collect(rank)

    def _check(self, index: int, move: GatherMove) -> bool:
        """Record what a move brings to whom; return whether it reads rows that its source has at the start.

        Raises ScheduleError for a move that does not fit the tensor or the moves before it.
        """
        asked = f"move {index} of {self.layout.function} {self.whole} on {self.size} ranks"
        for named in move.after:
            earlier(self.places, index, named)
        if isinstance(move, chunks.Collective):
            self._check_collective(asked, index, move)
            return False
        check_ends(asked, move, self.size)
        source, target = (move.rank, move.peer) if isinstance(move, chunks.Put) else (move.peer, move.rank)
        box = self._box(move.chunk)
        origin = getattr(move, "origin", None)
        is_free = isinstance(self.written, Gather) or origin is not None
        within = self.whole if is_free else Box(self.layout.owned(target)[0], self.whole.cols)
        if box.common(within) != box or not box.area:
            found, cure = f"chunk {move.chunk} is empty, or not inside {within}", "Name rows and columns of it"
            raise ScheduleError(asked, found, cure)
        is_own, arrived = True, list[int]()
        if origin is not None and origin != source:
            self.passed.leave(index, source, origin, box)
            is_own = False
        elif isinstance(self.written, Gather):
            is_own, arrived = self.held[source].sources(index, box)
        if found := move_obstacle(move, box, self.whole, is_own and not arrived, self.sends):
            raise ScheduleError(f"move {index}: carry {box} by mover={move.mover}", found, "Use mover=copy_engine")
        if origin is None or _is_within(box.rows, self.layout.owned(target)):
            self.held[target].take(index, Box(self.layout.lands(self._origin(move), target, box.rows), box.cols))
        else:
            self.passed.arrive(index, target, origin, box)
        if is_own and (arrived or isinstance(move, chunks.Get)):
            self.staged.add(source)
            return False
        return is_own

    def _check_collective(self, asked: str, index: int, move: chunks.Collective) -> None:
        """Record what a collective brings to every rank.

        Raises ScheduleError unless its chunks are whole rows, one part of each rank's own shard.
        """
        own = zip(move.chunks, self.held, strict=False)
        if len(move.chunks) != self.size or any(not one.owns(chunk.rows) for chunk, one in own):
            raise ScheduleError(asked, "its chunks are not one of each rank's own shard", "Give one for each rank")
        if any(self._box(chunk).cols != self.whole.cols for chunk in move.chunks):
            raise ScheduleError(asked, "its chunks are parts of rows", "Give one of whole rows for each rank")
        for rank in self.ranks:
            self.staged.add(rank)
            for peer, rows in enumerate(self._landing(move, rank)):
                if peer != rank:
                    self.held[rank].take(index, Box(rows, self.whole.cols))

    def _landing(self, move: chunks.Collective, rank: int) -> list[Range]:
        """Return where rows of a collective land on a rank, in the order of the ranks that they come from."""
        parts = [chunk.rows for chunk in move.chunks]
        if isinstance(self.written, Gather):
            return parts
        return [self.layout.lands(source, rank, parts[rank]) for source in range(self.size)]

    def _with_behind(self, moved: Iterable[int], step: Operation) -> Operation:
        """Return the operation of some moves; record the regions that the moves in their `after` write."""
        regions: list[Region] = []
        befores = [earlier(self.places, at, named) for at in moved for named in self.written.moves[at].after]
        for at, move in ((at, self.written.moves[at]) for at in befores):
            if isinstance(move, chunks.Collective):
                regions += [region(self.landed, step.rank, rows) for rows in self._landing(move, step.rank)]
            else:
                regions.append(self._lands(at))
        if regions:
            self.behind[step.name] = tuple(regions)
        return step

    def _lands(self, index: int) -> Region:
        """Return what a Put or Get writes: of the target's `landed`, unless it lies there for others."""
        if index in self.passed.writes:
            return self.passed.writes[index]
        move = self.written.moves[index]
        assert isinstance(move, chunks.Put | chunks.Get)
        target, box = move.peer if isinstance(move, chunks.Put) else move.rank, self._box(move.chunk)
        return Region(self.landed.name, target, self.layout.lands(self._origin(move), target, box.rows), box.cols)

    @staticmethod
    def _origin(move: chunks.Put | chunks.Get) -> int:
        """Return whose rows a move carries, of those that are exchanged."""
        if isinstance(move, chunks.Get):
            return move.peer
        return move.rank if move.origin is None else move.origin

    def _move(self, index: int, move: chunks.Put | chunks.Get, number: int) -> Put | Get:
        kind = Put if isinstance(move, chunks.Put) else Get
        source, target = self._ends(index)
        return kind(
            name=f"{'push' if kind is Put else 'pull'}.{move.rank}-{move.peer}.{number}",
            rank=move.rank,
            queue=queue_of(move, self.has_lanes),
            sources=(source,),
            destinations=(target,),
        )

    def _ends(self, index: int) -> tuple[Region, Region]:
        """Return what a Put or Get reads, and what it writes."""
        move = self.written.moves[index]
        assert isinstance(move, chunks.Put | chunks.Get)
        source, box = move.rank if isinstance(move, chunks.Put) else move.peer, self._box(move.chunk)
        buffer, rows = self.landed.name, box.rows
        if index in self.from_own:
            buffer, rows = self.own.name, self.layout.place(self.held[source], box.rows)
        return self.passed.reads.get(index) or Region(buffer, source, rows, box.cols), self._lands(index)

    def _nothing(self, rank: int) -> Region:
        return Region(self.landed.name, rank, (0, 0), (0, 0))

    def _collective(self, index: int, move: chunks.Collective, rank: int) -> LibraryCollective:
        parts = self._parts(move)
        return LibraryCollective(
            name=f"{self.layout.function}.{rank}.{index}",
            rank=rank,
            queue=MAIN,
            function=self.layout.function,
            label=f"{self.layout.function}.{index}",
            ranks=tuple(range(self.size)),
            sources=tuple(region(self.own, rank, rows) for rows in self.layout.sent(rank, parts)),
            destinations=tuple(region(self.landed, rank, rows) for rows in self._landing(move, rank)),
        )

    def _parts(self, move: chunks.Collective) -> list[Range]:
        """Return the rows of each rank's `own` buffer that a collective reads."""
        return [self.layout.place(held, chunk.rows) for held, chunk in zip(self.held, move.chunks, strict=True)]

    def _staged(self, rank: int) -> Iterator[Copy]:
        """Yield the copy of a rank's own rows to `landed`, without those that a collective places there."""
        held = self.held[rank]
        by_collectives = [move.chunks[rank].rows for move in self.collectives]
        rest = [rows for own in held.owned for rows in _without(own, by_collectives)]
        if rank in self.staged and rest:
            yield Copy(
                name=f"stage.{rank}",
                rank=rank,
                queue=MAIN,
                sources=tuple(region(self.own, rank, self.layout.place(held, rows)) for rows in rest),
                destinations=tuple(region(self.landed, rank, rows) for rows in rest),
            )

    def _consumed_chunks(self, rank: int) -> Iterator[MatmulChunk]:
        """Yield the chunks that tiles read: rows that are there before tiles begin, merged where they adjoin, then the
        others in the order in which their last part arrives."""
        merged: list[_ReadRows] = []
        for read in sorted(self._reads(rank), key=lambda read: (read.arrival, read.rows)):
            last = merged[-1] if merged else None
            if last and read.arrival == PRESENT == last.arrival and _adjoin(last, read):
                rows, within = (last.rows[0], read.rows[1]), (last.region.rows[0], read.region.rows[1])
                name = last.name if merged[1:] else f"multiply.{rank}"  # a later stretch is named after its first part
                merged[-1] = _ReadRows(PRESENT, rows, replace(last.region, rows=within), name)
            else:
                merged.append(read)
        yield from (MatmulChunk(name=read.name, rank=rank, rows=read.rows, region=read.region) for read in merged)

    def _reads(self, rank: int) -> Iterator[_ReadRows]:
        """Yield the rows that a rank's tiles read: its own, then the ranges between all edges of what arrives."""
        held = self.held[rank]
        for index, rows in enumerate(held.owned):
            has_landed = rank in self.staged and self.collectives
            own = rows if has_landed else self.layout.place(held, rows)
            name = f"multiply.{rank}.own.{index}" if index else f"multiply.{rank}.own"
            if not is_empty(rows):
                yield _ReadRows(PRESENT, rows, region(self.landed if has_landed else self.own, rank, own), name)
        cuts = sorted({edge for _, box in held.arrived for edge in box.rows})
        arrivals: dict[int, int] = {}  # of rows `[cuts[i], cuts[i + 1])` -> the last move that brings any of them
        for index, box in held.arrived:
            arrival = PRESENT if isinstance(self.written.moves[index], chunks.Collective) else index
            for cut in range(bisect_right(cuts, box.rows[0]) - 1, bisect_right(cuts, box.rows[1]) - 1):
                arrivals[cut] = max(arrivals.get(cut, PRESENT), arrival)
        numbers: Counter[int] = Counter()
        for cut in sorted(arrivals):
            rows = cuts[cut], cuts[cut + 1]
            owner = self.owners[bisect_right(self.owners, ((rows[0], self.whole.rows[1]), self.size)) - 1][1]
            name = f"multiply.{rank}-{owner}.{numbers[owner]}"
            numbers[owner] += 1
            yield _ReadRows(arrivals[cut], rows, region(self.landed, rank, rows), name)

    def _produced_chunks(self, rank: int) -> Iterator[MatmulChunk]:
        """Yield the chunks that tiles write: the ranges between all edges of what is sent, in the order of sending,
        then the rows that are sent to no rank."""
        buffer = self.out if self.out and self.size == 1 else self.own
        sent = in_order_of(self._sent(rank))
        rest = [] if self.layout.extent(rank) == 0 else _without((0, self.layout.extent(rank)), sent)
        for rows in (*sent, *rest):
            yield MatmulChunk(name=f"made.{rank}.{rows[0]}", rank=rank, rows=rows, region=region(buffer, rank, rows))

    def _sent(self, rank: int) -> Iterator[Range]:
        """Yield the rows of `own` that a rank's moves read, in the order of the list."""
        for index in self.written.of_rank(rank):
            move = self.written.moves[index]
            if isinstance(move, chunks.Collective):  # it takes nothing before all are there
                yield from united(sorted(self.layout.sent(rank, self._parts(move))))
            elif index in self.from_own:
                yield self.layout.place(self.held[rank], move.chunk.rows)

    def _collect(self, rank: int) -> Copy:
        """Return the copy of a rank's own rows and of all that arrived to the caller's buffer."""
        assert self.out is not None
        held = self.held[rank]
        # Own rows that were not staged lie apart from those that arrived.
        apart = [rows for rows in held.owned if not is_empty(rows) and (self.sends or rank not in self.staged)]
        parts = [(region(self.own, rank, self.layout.place(held, rows)), rows) for rows in apart]
        parts += [(region(self.landed, rank, rows), rows) for rows in _without(self.whole.rows, apart)]
        return Copy(
            name=f"collect.{rank}",
            rank=rank,
            queue=MAIN,
            sources=tuple(source for source, _ in parts),
            destinations=tuple(region(self.out, rank, rows) for _, rows in parts),
        )

    def _box(self, chunk: chunks.Chunk) -> Box:
        return Box(chunk.rows, chunk.cols or self.whole.cols)


def in_order_of(reads: Iterable[Range]) -> list[Range]:
    """Return the ranges between all edges of the reads, in the order of their first read."""
    ranges = list(reads)
    edges = sorted({edge for rows in ranges for edge in rows})
    first: dict[int, int] = {}  # of rows `[edges[i], edges[i + 1])` -> the first range that holds them
    for index, rows in enumerate(ranges):
        for cut in range(bisect_right(edges, rows[0]) - 1, bisect_right(edges, rows[1]) - 1):
            first.setdefault(cut, index)
    return [(edges[cut], edges[cut + 1]) for cut in sorted(first, key=lambda cut: (first[cut], cut))]


def _without(whole: Range, parts: Iterable[Range]) -> list[Range]:
    """Return the ranges of `whole` that lie in none of its parts, which do not overlap."""
    inside = sorted(rows for rows in (common(whole, part) for part in parts) if not is_empty(rows))
    ends, begins = [whole[0], *(rows[1] for rows in inside)], [*(rows[0] for rows in inside), whole[1]]
    return [rows for rows in zip(ends, begins, strict=True) if not is_empty(rows)]


def _is_within(rows: Range, owned: tuple[Range, ...]) -> bool:
    return any(lo <= rows[0] and rows[1] <= hi for lo, hi in owned)


def _adjoin(one: _ReadRows, other: _ReadRows) -> bool:
    return one.rows[1] == other.rows[0] and one.region.buffer == other.region.buffer


# Layouts: the rows that a rank has at the start, where a peer's rows land, and the tensor that it has at the end.


class Gathered(Struct, frozen=True):
    """All-gather: each rank has its shard and gets the whole tensor."""

    written: Gather
    rows: int
    cols: int
    function: ClassVar[Literal["all_gather"]] = "all_gather"

    def owned(self, rank: int) -> tuple[Range, ...]:
        """Return the rows of its final tensor that a rank has at the start."""
        return owned_rows(self.rows, self.written.world_size, rank, self.written.ranges)

    def extent(self, rank: int) -> int:
        return rows_of(self.owned(rank))

    def place(self, held: RankRows, rows: Range) -> Range:
        return held.place(rows)

    def lands(self, source: int, target: int, rows: Range) -> Range:
        """Return the target's rows that the source's `rows` become."""
        return rows

    def sent(self, rank: int, parts: list[Range]) -> list[Range]:
        """Return what a rank sends in a collective, given each rank's part of it, in the order of ranks."""
        return [parts[rank]]

    def tensor(self, rank: int) -> str:
        return A

    def given(self, rank: int) -> Iterator[InitialContents]:
        """Yield which parts of which tensor a rank's input holds."""
        first = 0
        for lo, hi in self.owned(rank):
            if lo < hi:
                yield InitialContents(Region(X, rank, (first, first + hi - lo), (0, self.cols)), A, lo, 0)
            first += hi - lo


class Traded(Struct, frozen=True):
    """All-to-all: block p of rank s becomes block s of rank p, whose tensor is its own."""

    written: AllToAll
    rows: int
    cols: int
    function: ClassVar[Literal["all_to_all"]] = "all_to_all"

    def __post_init__(self) -> None:
        if self.rows % self.written.world_size:
            found = f"{self.rows} rows are no whole blocks for {self.written.world_size} ranks"
            raise InputError("exchange all to all", found, "Pad the rows to a multiple of the ranks")

    @property
    def block(self) -> int:
        return self.rows // self.written.world_size

    def owned(self, rank: int) -> tuple[Range, ...]:
        return ((rank * self.block, (rank + 1) * self.block),)

    def extent(self, rank: int) -> int:
        return self.rows

    def place(self, held: RankRows, rows: Range) -> Range:
        return rows

    def lands(self, source: int, target: int, rows: Range) -> Range:
        return shifted(rows, (source - target) * self.block)

    def sent(self, rank: int, parts: list[Range]) -> list[Range]:
        return parts

    def tensor(self, rank: int) -> str:
        return all_to_all_result(A, rank)

    def given(self, rank: int) -> Iterator[InitialContents]:
        for to in range(self.written.world_size):
            rows = shifted((0, self.block), to * self.block)
            yield InitialContents(Region(X, rank, rows, (0, self.cols)), all_to_all_result(A, to), rank * self.block, 0)
