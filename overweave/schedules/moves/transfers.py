"""From a list of moves that adds nothing up to operations: all-gathers and all-to-alls, before or behind tiles.

Before a kernel, its tiles read the caller's rows and what has arrived, in parts that arrive together. Behind one, they
write what is sent, in the order of sending, and what has arrived is copied to the caller. A rank whose own rows are
read where peers can reach first copies them there. What the library carries does so on the caller's stream, and a
rank's own part of it, too, lands where tiles read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
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
)
from overweave.schedules.moves import moves as chunks
from overweave.schedules.moves.back_ends import check_ends, move_obstacle, queue_of, several_lanes
from overweave.schedules.moves.moves import AllToAll, Box, Gather, GatherMove, RankRows, earlier

OWN = "own"  # a buffer: what tiles write
BEFORE = -1  # stands for all that is there before tiles begin among the moves that bring something


def transferred(
    written: Gather | AllToAll, rows: int, cols: int, *, sends: bool = False, returns_gathered: bool = False
) -> Communication:
    """The moves of a tensor `[rows, cols]`, with a `MatmulChunk` where each part that arrives, or is sent, may be used.

    sends: tiles write what moves; else they read it. returns_gathered: once all has arrived it is copied to output
    `gathered_out`. Raises ScheduleError for moves that read what is not there, bring something twice, or leave
    something out.
    """
    geometry = Traded(written, rows, cols) if isinstance(written, AllToAll) else Gathered(written, rows, cols)
    out = Buffer(GATHERED_OUT if returns_gathered else Y, rows, cols, "output")
    made = _Transfers(written, geometry, out if sends or returns_gathered else None, sends)
    ranks = range(written.world_size if rows else 0)
    steps = [step for rank in ranks for step in made.of_rank(rank)]
    communication = communicated(
        written.world_size,
        steps,
        [one for one in (None if sends else made.mine, made.out) if one],
        given=(given for rank in ranks if not sends for given in geometry.given(rank)),
        goal=(Goal(region(made.out, rank, (0, rows)), geometry.tensor(rank), 0, 0) for rank in ranks if made.out),
        tiles_read=not sends,
    )
    return replace(communication, behind=made.behind)


class _Use(NamedTuple):
    """Rows that a rank's tiles read together. turn: the last move that brings some of them."""

    turn: int
    rows: Range
    region: Region
    name: str


class _Transfers:
    """The operations of one list at one size.

    mine: what a rank begins with, or its tiles write. landed: what arrives, and what peers come for. out: where all of
    it is in the end, if not there. held: what each rank has of that.
    """

    def __init__(self, written: Gather | AllToAll, how: Gathered | Traded, out: Buffer | None, sends: bool) -> None:
        self.written, self.how, self.out, self.sends, self.size = written, how, out, sends, written.world_size
        self.whole = Box((0, how.rows), (0, how.cols))
        self.held = [RankRows(rank, how.owned(rank), self.whole.cols) for rank in range(self.size)]
        self.places, self.has_lanes = written.places(), several_lanes(written)
        self.behind: dict[str, tuple[Region, ...]] = {}
        self.staged: set[int] = set()
        self.by_library = [one for one in written.moves if isinstance(one, chunks.Collective)]
        self.is_all_by_library = len(self.by_library) == len(written.moves)
        self.from_mine = {at for at, move in enumerate(written.moves) if self._note(at, move)}
        for one in self.held:
            one.check_whole(self.whole)
        self.mine = Buffer(OWN if sends else X, max(map(how.extent, range(self.size))), how.cols, "input")
        self.landed = Buffer(GATHERED, how.rows, how.cols, "symmetric")
        if out and sends and (self.is_all_by_library or self.size == 1):
            self.landed = out  # what the library brings goes straight there
        self.owners = sorted((rows, one.rank) for one in self.held for rows in one.owned if not is_empty(rows))

    def of_rank(self, rank: int) -> Iterator[Operation | MatmulChunk]:
        """In the order of their launch."""
        yield from self._written_by_tiles(rank) if self.sends else ()
        yield from self._staged(rank)
        numbers: Counter[int] = Counter()  # of the moves between this rank and a peer
        for at in self.written.of_rank(rank):
            move = self.written.moves[at]
            if isinstance(move, chunks.Collective):
                yield self._named_behind(at, self._collective(at, move, rank))
            else:
                yield self._named_behind(at, self._move(at, move, numbers[move.peer]))
                numbers[move.peer] += 1
        yield from () if self.sends else self._read_by_tiles(rank)
        if self.out and self.landed != self.out:
            yield self._collect(rank)

    def _note(self, at: int, move: GatherMove) -> bool:
        """Whether a move reads what a rank begins with. Raises ScheduleError where it does not fit."""
        asked = f"move {at} of {self.how.function} {self.whole} on {self.size} ranks"
        for named in move.after:
            earlier(self.places, at, named)
        if isinstance(move, chunks.Collective):
            self._note_together(asked, at, move)
            return False
        check_ends(asked, move, self.size)
        source, target = (move.rank, move.peer) if isinstance(move, chunks.Put) else (move.peer, move.rank)
        box = self._box(move.chunk)
        within = self.whole if isinstance(self.written, Gather) else Box(self.how.owned(target)[0], self.whole.cols)
        if box.common(within) != box or not box.area:
            found, cure = f"chunk {move.chunk} is empty, or not inside {within}", "Name rows and columns of it"
            raise ScheduleError(asked, found, cure)
        traded = isinstance(self.written, AllToAll)
        is_own, arrived = (True, []) if traded else self.held[source].sources(at, box)
        if found := move_obstacle(move, box, self.whole, is_own and not arrived, self.sends):
            raise ScheduleError(f"move {at}: carry {box} by mover={move.mover}", found, "Use mover=copy_engine")
        self.held[target].take(at, Box(self.how.lands(source, target, box.rows), box.cols))
        if is_own and (arrived or isinstance(move, chunks.Get)):
            self.staged.add(source)
            return False
        return is_own

    def _note_together(self, asked: str, at: int, move: chunks.Collective) -> None:
        own = zip(move.chunks, self.held, strict=False)
        if len(move.chunks) != self.size or any(not one.owns(chunk.rows) for chunk, one in own):
            raise ScheduleError(asked, "its chunks are not one of each rank's own shard", "Give one for each rank")
        if any(self._box(chunk).cols != self.whole.cols for chunk in move.chunks):
            raise ScheduleError(asked, "its chunks are parts of rows", "Give one of whole rows for each rank")
        for rank, held in enumerate(self.held):
            self.staged.add(rank)
            for peer, rows in enumerate(self._landing(move, rank)):
                if peer != rank:
                    held.take(at, Box(rows, self.whole.cols))

    def _landing(self, move: chunks.Collective, rank: int) -> list[Range]:
        """Where what the library brings to a rank lands, in the order of the ranks that it comes from."""
        parts = [chunk.rows for chunk in move.chunks]
        if isinstance(self.written, Gather):
            return parts
        return [self.how.lands(source, rank, parts[rank]) for source in range(self.size)]

    def _named_behind(self, at: int, step: Operation) -> Operation:
        """Notes what a step is to come after."""
        regions: list[Region] = []
        for named in self.written.moves[at].after:
            place = earlier(self.places, at, named)
            move = self.written.moves[place]
            if isinstance(move, chunks.Collective):
                regions += [region(self.landed, step.rank, rows) for rows in self._landing(move, step.rank)]
            else:
                regions.append(self._lands(move))
        if regions:
            self.behind[step.name] = tuple(regions)
        return step

    def _lands(self, move: chunks.Put | chunks.Get) -> Region:
        source, target = (move.rank, move.peer) if isinstance(move, chunks.Put) else (move.peer, move.rank)
        box = self._box(move.chunk)
        return Region(self.landed.name, target, self.how.lands(source, target, box.rows), box.cols)

    def _move(self, at: int, move: chunks.Put | chunks.Get, number: int) -> Put | Get:
        kind, source = (Put, move.rank) if isinstance(move, chunks.Put) else (Get, move.peer)
        box = self._box(move.chunk)
        buffer, rows = self.landed.name, box.rows
        if at in self.from_mine:
            buffer, rows = self.mine.name, self.how.place(self.held[source], box.rows)
        return kind(
            name=f"{'push' if kind is Put else 'pull'}.{move.rank}-{move.peer}.{number}",
            rank=move.rank,
            queue=queue_of(move, self.has_lanes),
            sources=(Region(buffer, source, rows, box.cols),),
            destinations=(self._lands(move),),
        )

    def _collective(self, at: int, move: chunks.Collective, rank: int) -> LibraryCollective:
        parts = [self.how.place(held, chunk.rows) for held, chunk in zip(self.held, move.chunks, strict=True)]
        return LibraryCollective(
            name=f"{self.how.function}.{rank}.{at}",
            rank=rank,
            queue=MAIN,
            function=self.how.function,
            label=f"{self.how.function}.{at}",
            ranks=tuple(range(self.size)),
            sources=tuple(region(self.mine, rank, rows) for rows in self.how.sent(rank, parts)),
            destinations=tuple(region(self.landed, rank, rows) for rows in self._landing(move, rank)),
        )

    def _staged(self, rank: int) -> Iterator[Copy]:
        """A rank's own rows to where peers read, but for those that the library puts there."""
        held = self.held[rank]
        given = [move.chunks[rank].rows for move in self.by_library]
        rest = [rows for own in held.owned for rows in _without(own, given)]
        if rank in self.staged and rest:
            yield Copy(
                name=f"stage.{rank}",
                rank=rank,
                queue=MAIN,
                sources=tuple(region(self.mine, rank, self.how.place(held, rows)) for rows in rest),
                destinations=tuple(region(self.landed, rank, rows) for rows in rest),
            )

    def _read_by_tiles(self, rank: int) -> Iterator[MatmulChunk]:
        """The own rows, then all others in the order in which the last part of them arrives; what is there before
        tiles begin, at once."""
        united: list[_Use] = []
        for use in sorted(self._uses(rank), key=lambda use: (use.turn, use.rows)):
            last = united[-1] if united else None
            if last and use.turn == BEFORE == last.turn and _follow(last, use):
                rows, read = (last.rows[0], use.rows[1]), (last.region.rows[0], use.region.rows[1])
                name = last.name if united[1:] else f"multiply.{rank}"  # a later stretch is named after its first part
                united[-1] = _Use(BEFORE, rows, replace(last.region, rows=read), name)
            else:
                united.append(use)
        yield from (MatmulChunk(name=use.name, rank=rank, rows=use.rows, region=use.region) for use in united)

    def _uses(self, rank: int) -> Iterator[_Use]:
        held = self.held[rank]
        for at, rows in enumerate(held.owned):
            is_here = rank in self.staged and self.by_library
            own = rows if is_here else self.how.place(held, rows)
            name = f"multiply.{rank}.own.{at}" if at else f"multiply.{rank}.own"
            if not is_empty(rows):
                yield _Use(BEFORE, rows, region(self.landed if is_here else self.mine, rank, own), name)
        cuts = sorted({edge for _, box in held.arrived for edge in box.rows})
        turns: dict[int, int] = {}  # of each range between two cuts in which something arrives
        for at, box in held.arrived:
            turn = BEFORE if isinstance(self.written.moves[at], chunks.Collective) else at
            for cut in range(bisect_right(cuts, box.rows[0]) - 1, bisect_right(cuts, box.rows[1]) - 1):
                turns[cut] = max(turns.get(cut, BEFORE), turn)
        numbers: Counter[int] = Counter()
        for cut in sorted(turns):
            rows = cuts[cut], cuts[cut + 1]
            owner = self.owners[bisect_right(self.owners, ((rows[0], self.whole.rows[1]), self.size)) - 1][1]
            name = f"multiply.{rank}-{owner}.{numbers[owner]}"
            numbers[owner] += 1
            yield _Use(turns[cut], rows, region(self.landed, rank, rows), name)

    def _written_by_tiles(self, rank: int) -> Iterator[MatmulChunk]:
        """What is sent, between all edges of what moves, in the order of sending; then the rest."""
        buffer = self.out if self.out and self.size == 1 else self.mine
        sent = list(self._sent(rank))
        found = in_order_of(sent)
        rest = [] if self.how.extent(rank) == 0 else _without((0, self.how.extent(rank)), found)
        for rows in (*found, *rest):
            yield MatmulChunk(name=f"made.{rank}.{rows[0]}", rank=rank, rows=rows, region=region(buffer, rank, rows))

    def _sent(self, rank: int) -> Iterator[Range]:
        """The rows of its own that a rank's moves read, in the order of the list."""
        for at in self.written.of_rank(rank):
            move = self.written.moves[at]
            if isinstance(move, chunks.Collective):
                parts = [self.how.place(held, chunk.rows) for held, chunk in zip(self.held, move.chunks, strict=True)]
                yield from self.how.sent(rank, parts)
            elif at in self.from_mine:
                yield self.how.place(self.held[rank], move.chunk.rows)

    def _collect(self, rank: int) -> Copy:
        """Everything that has arrived, and the own rows, to the caller's output."""
        assert self.out is not None
        held = self.held[rank]
        # Of a rank's own rows, those that do not lie among what has arrived.
        apart = [rows for rows in held.owned if not is_empty(rows) and (self.sends or rank not in self.staged)]
        parts = [(region(self.mine, rank, self.how.place(held, rows)), rows) for rows in apart]
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
    """The rows between all edges of what is read, in the order of first reading."""
    listed = list(reads)
    edges = sorted({edge for rows in listed for edge in rows})
    first: dict[int, int] = {}
    for at, rows in enumerate(listed):
        for cut in range(bisect_right(edges, rows[0]) - 1, bisect_right(edges, rows[1]) - 1):
            first.setdefault(cut, at)
    return [(edges[cut], edges[cut + 1]) for cut in sorted(first, key=lambda cut: (first[cut], cut))]


def _without(whole: Range, parts: Iterable[Range]) -> list[Range]:
    """The rows of a range that lie in none of its parts, which do not overlap."""
    inside = sorted(rows for rows in (common(whole, part) for part in parts) if not is_empty(rows))
    ends, begins = [whole[0], *(rows[1] for rows in inside)], [*(rows[0] for rows in inside), whole[1]]
    return [rows for rows in zip(ends, begins, strict=True) if not is_empty(rows)]


def _follow(one: _Use, other: _Use) -> bool:
    return one.rows[1] == other.rows[0] and one.region.buffer == other.region.buffer


# Where rows lie in exchanges that add nothing: what a rank begins with, where it lands, what there is at the end.


class Gathered(Struct, frozen=True):
    """Each rank has its shard, and gets all of the tensor."""

    written: Gather
    rows: int
    cols: int
    function: ClassVar[Literal["all_gather"]] = "all_gather"

    def owned(self, rank: int) -> tuple[Range, ...]:
        """The rows that a rank has from the beginning, of what it is to have at the end."""
        return owned_rows(self.rows, self.written.world_size, rank, self.written.ranges)

    def extent(self, rank: int) -> int:
        """The rows that a rank begins with."""
        return rows_of(self.owned(rank))

    def place(self, held: RankRows, rows: Range) -> Range:
        """Where rows of a rank's own lie in what it begins with."""
        return held.place(rows)

    def lands(self, source: int, target: int, rows: Range) -> Range:
        """Where rows that one rank names lie at another."""
        return rows

    def sent(self, rank: int, parts: list[Range]) -> list[Range]:
        """Of each rank's part of what the library carries, what a rank gives it, in the order of ranks."""
        return [parts[rank]]

    def tensor(self, rank: int) -> str:
        """What a rank has at the end."""
        return A

    def given(self, rank: int) -> Iterator[InitialContents]:
        """What a rank begins with."""
        first = 0
        for lo, hi in self.owned(rank):
            if lo < hi:
                yield InitialContents(Region(X, rank, (first, first + hi - lo), (0, self.cols)), A, lo, 0)
            first += hi - lo


class Traded(Struct, frozen=True):
    """Each rank has a block for every rank, and block p of rank s becomes block s of rank p, of a tensor of its own."""

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
