"""From a list of moves and sums to a Communication: tiles announce what they write, sums wait for what arrives.

Every value that is read by somebody is announced to whoever reads it, and nothing else is. Sums run in a kernel beside
the tiles where a kernel can tell what they wait for and every rank's first one waits for tiles of its own; behind the
tiles where not every one does; and are the library's, on the caller's stream, where they are of parts of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from msgspec import Struct

from overweave.errors import ScheduleError
from overweave.ir.plan import ReduceConfig
from overweave.ir.schedule import (
    Buffer,
    Copy,
    Get,
    Goal,
    Notify,
    Operation,
    Put,
    Queue,
    Range,
    Reduce,
    Region,
    SignalPad,
    Wait,
)
from overweave.ir.tensors import product
from overweave.schedules.communication import (
    ARRIVED,
    COMPLETE,
    COMPUTED,
    COPYING_KERNELS,
    ISSUE,
    MAIN,
    PARTIAL,
    RUNNING,
    SLOTS,
    SUMMED,
    SUMS,
    TELLERS,
    TILES,
    TOTAL,
    A,
    B,
    Chunk,
    Communication,
    Y,
    common,
    is_empty,
    shifted,
    used,
)
from overweave.schedules.families.summed_together import results_together, summed_together
from overweave.schedules.moves import moves as chunks
from overweave.schedules.moves.arrival_layout import ArrivalLayout
from overweave.schedules.moves.back_ends import ENGINE, PUSHES, REGISTERS, check_told, move_obstacle, queue_of
from overweave.schedules.moves.moves import Box, Reduction, earlier
from overweave.schedules.moves.provenance import (
    OWN,
    Added,
    Carried,
    Part,
    Piece,
    Provenance,
    partials,
    trace_provenance,
)
from overweave.schedules.moves.signal_numbers import TOLD, Event, SignalNumbers
from overweave.schedules.weave.fewest_waits import is_tellable

KERNEL_COLS = 8  # the kernel that sums reads words of 16 bytes
BESIDE, BEHIND, LIBRARY = "beside", "behind", "library"  # tiles, where sums run; or whose they are


def chunked_reduction(reduction: Reduction, rows: int, cols: int, held: tuple[Range, ...]) -> Communication:
    """The moves of a reduction of `[rows, cols]`, with a `Chunk` where each part of a partial is written.

    held: the range of the reduced axis that each rank's partial holds. Raises ScheduleError for moves that leave a
    partial out, add one twice, or add differently on two ranks that end with the same.
    """
    provenance = trace_provenance(reduction, rows, cols)
    _check_movers(provenance)
    ways: tuple[str, ...] = (BESIDE, BEHIND, LIBRARY) if cols % KERNEL_COLS == 0 else (LIBRARY,)
    moves = (move for move in reduction.moves if isinstance(move, chunks.Put | chunks.Get))
    if any(move.mover in COPYING_KERNELS for move in moves):
        ways = tuple(way for way in ways if way != BESIDE)  # sums could hold the SMs that the own pushes need
    for way in ways:
        made = _Lowering(provenance, cols, way)
        if way == LIBRARY or made.is_for_a_kernel:
            return made.communication(held)
    raise AssertionError("the library adds whatever there is")


def _check_movers(provenance: Provenance) -> None:
    """Raises ScheduleError where a back end cannot carry a move."""
    for one in provenance.done:
        move = provenance.reduction.moves[one.at] if isinstance(one, Carried) else None
        if isinstance(one, Carried) and isinstance(move, chunks.Put | chunks.Get):
            is_own = {part.buffer for piece in one.pieces for part in piece.parts} == {PARTIAL}
            found = move_obstacle(move, one.box, provenance.whole, is_own) or (move.mover == "bulk_tiles" and REGISTERS)
            if found:
                asked = f"move {one.at}: carry {one.box} by mover={move.mover}"
                raise ScheduleError(asked, found, "Use mover=copy_engine")


class _Sum(Struct, frozen=True):
    """One Reduce: the index-th part of the sum at position `event`; index OWN: a sum is moved to the result."""

    event: int
    rank: int
    index: int
    box: Box
    parts: tuple[Part, ...]
    kept: Part | None  # None: the result
    waits: tuple[Wait, ...]


class _Lowering:
    """The operations of a reduction whose sums run where `way` says. Signals of sums have the first numbers."""

    def __init__(self, provenance: Provenance, cols: int, way: str) -> None:
        self.provenance, self.way, self.cols = provenance, way, cols
        self.size, self.rows = provenance.reduction.world_size, provenance.whole.rows[1]
        self.moves = {one.at: one for one in provenance.done}
        self.carried = [one for one in provenance.done if isinstance(one, Carried)]
        moves = [move for move in provenance.reduction.moves if isinstance(move, chunks.Put | chunks.Get)]
        self.lanes = {move.lane for move in moves if move.mover == ENGINE}
        self.holes = [_holes(self._reads(rank)) for rank in range(self.size)]
        self.slots = ArrivalLayout.of(self.carried, self.size)
        self.numbers = SignalNumbers()
        self.places = provenance.reduction.places()
        self.sums = {one.at: list(self._split(one)) for one in provenance.done if isinstance(one, Added)}
        self.sums = {at: [self._with_waits(one) for one in sums] for at, sums in self.sums.items()}
        self.ends = [[self._with_waits(one) for one in self._moves_at_the_end(rank)] for rank in range(self.size)]
        self.tells: list[tuple[int, Copy]] = []  # and the move in front of which one stands
        self.waits = {one.at: self._waits_of(one) for one in self.carried}

    @property
    def is_for_a_kernel(self) -> bool:
        """Whether the kernel that sums can be told everything, and may run where it is to run."""
        all_sums = [one for sums in (*self.sums.values(), *self.ends) for one in sums]
        if not all(one.box.cols == self.provenance.whole.cols and is_tellable(one.waits) for one in all_sums):
            return False
        first: dict[int, _Sum] = {}
        for one in all_sums:
            first.setdefault(one.rank, one)
        return self.way == BEHIND or all(COMPUTED in {wait.pad for wait in one.waits} for one in first.values())

    def communication(self, held: tuple[Range, ...]) -> Communication:
        ranks = range(self.size)
        steps = [step for rank in ranks for step in self._of_rank(rank)]
        known = (
            *(self._buffer(name, self.rows) for name in (PARTIAL, TOTAL)),
            *(self._buffer(f"{RUNNING}.{layer}", self.rows) for layer in range(self._layers)),
            Buffer(SLOTS, self.slots.rows, self.cols, "symmetric"),
            Buffer(Y, self._result_rows, self.cols, "output"),
        )
        return Communication(
            world_size=self.size,
            buffers=used(known, steps),
            pads=tuple(SignalPad(pad, size) for pad, size in self.numbers.sizes()),
            queues=tuple(self._queues(steps)),
            given=(),
            goal=tuple(goal for rank in ranks for goal in self._goals(rank, held)),
            steps=tuple(steps),
        )

    @property
    def _layers(self) -> int:
        kept = (one.kept for one in self.provenance.done if isinstance(one, Added))
        return max((part.layer + 1 for part in kept if part.buffer == RUNNING), default=0)

    @property
    def _result_rows(self) -> int:
        return self.rows if self.provenance.reduction.everywhere else -(-self.rows // self.size)

    def _buffer(self, name: str, rows: int) -> Buffer:
        """What peers pull, or put to, they must reach."""
        pulled = {
            part.buffer if part.buffer != RUNNING else f"{RUNNING}.{part.layer}"
            for one in self.carried
            if self._mover(one) == one.target
            for piece in one.pieces
            for part in piece.parts
        }
        return Buffer(name, rows, self.cols, "symmetric" if name == TOTAL or name in pulled else "local")

    def _mover(self, one: Carried) -> int:
        return self._move(one.at).rank

    def _move(self, at: int) -> chunks.Put | chunks.Get:
        move = self.provenance.reduction.moves[at]
        assert isinstance(move, chunks.Put | chunks.Get)
        return move

    def _lane(self, at: int) -> str:
        return queue_of(self._move(at), len(self.lanes) > 1)

    def _reads(self, rank: int) -> list[Range]:
        """The rows of its own partial that somebody reads, in the order of the list."""
        found: list[Range] = []
        for one in self.provenance.done:
            if (one.source if isinstance(one, Carried) else one.rank) == rank:
                found += [piece.box.rows for piece in one.pieces if OWN in piece.by]
        return found + [rows for together in self.provenance.together.values() for rows in together]

    def _split(self, one: Added) -> Iterator[_Sum]:
        """A sum of tiles that are announced apart is several."""
        index = 0
        kept = one.kept if one.kept.buffer == RUNNING or (one.at, one.rank) in self.provenance.read else None
        wanted = self.provenance.wanted(one.rank)
        for piece in one.pieces:
            if kept is None and piece.box.common(wanted) != piece.box:
                found = f"its sum of {piece.box} is neither rank {one.rank}'s result nor passed on"
                raise ScheduleError(f"add on rank {one.rank}", found, "Leave it out, or pass it on")
            for rows in self._holes_of(one.rank, piece.box.rows) if OWN in piece.by else [piece.box.rows]:
                yield _Sum(one.at, one.rank, index, Box(rows, piece.box.cols), piece.parts, kept, ())
                index += 1

    def _holes_of(self, rank: int, rows: Range) -> list[Range]:
        met = (common(rows, hole) for hole in self.holes[rank])
        return sorted(pair for pair in met if not is_empty(pair))

    def _moves_at_the_end(self, rank: int) -> Iterator[_Sum]:
        """What is a sum elsewhere than in the result, to the result."""
        for piece in self.provenance.ends[rank]:
            (part,) = piece.parts
            written = [one for by in piece.by for one in self.sums.get(by, ()) if one.kept is None]
            if part.buffer == TOTAL and not written:
                yield _Sum(piece.by[0], rank, OWN, piece.box, (part,), None, ())

    def _with_waits(self, one: _Sum) -> _Sum:
        piece = Piece(one.box, one.parts, self._bringers(one))
        events = list(self._ready(one.rank, piece))
        move = self.moves[one.event]
        if isinstance(move, Added) and one.index != OWN and one.event < len(self.provenance.reduction.moves):
            events += self._after(one.event, one.rank, MAIN if self.way == LIBRARY else SUMS)
        if self.way == LIBRARY:  # stands behind the tiles, and behind the sums before it
            events = [event for event in events if not (event.rank == one.rank and event.pad in (COMPUTED, SUMMED))]
        if self.way == BEHIND:
            events = [event for event in events if event.pad != COMPUTED]
        return _Sum(one.event, one.rank, one.index, one.box, one.parts, one.kept, self.numbers.waits(events))

    def _bringers(self, one: _Sum) -> tuple[int, ...]:
        """The moves that bring what it adds."""
        move = self.moves[one.event]
        pieces = self.provenance.ends[one.rank] if one.index == OWN else move.pieces
        met = (piece for piece in pieces if piece.box.common(one.box).area)
        return tuple(sorted({by for piece in met for by in piece.by}))

    def _ready(self, rank: int, piece: Piece) -> Iterator[Event]:
        """What a rank hears when all of a piece is there, without what the order of a copy queue implies."""
        if OWN in piece.by:
            for rows in self._holes_of(rank, piece.box.rows):
                hole = next(at for at, one in enumerate(self.holes[rank]) if one[0] <= rows[0] and rows[1] <= one[1])
                yield Event(COMPUTED, rank, ("tiles", rank, hole))
        last: dict[tuple[int, str, int], int] = {}
        for by in piece.by:
            one = self.moves.get(by)
            if isinstance(one, Carried):
                is_ordered = self._move(by).mover == ENGINE  # kernels announce in any order
                last[self._mover(one), self._lane(by), 0 if is_ordered else by] = by
            elif isinstance(one, Added):
                met = (each for each in self.sums[by] if each.box.common(piece.box).area)
                yield from (Event(SUMMED, rank, ("sum", by, each.index)) for each in met)
        for by in sorted(last.values()):
            yield Event(ARRIVED, rank, ("move", by, rank), self._move(by).mover != ENGINE)

    def _waits_of(self, one: Carried) -> tuple[Wait, ...]:
        """What a move waits for: its sources, and whatever it is to come after."""
        mover = self._mover(one)
        ready = [event for piece in one.pieces for event in self._ready(one.source, piece)]
        if mover != one.source:
            ready = [self._told(one.at, ready, mover)]
        return self.numbers.waits([*ready, *self._after(one.at, mover, self._lane(one.at))])

    def _after(self, at: int, rank: int, queue: str) -> list[Event]:
        events: list[Event] = []
        for named in self.provenance.reduction.moves[at].after:
            place = earlier(self.places, at, named)
            one = self.moves[place]
            if isinstance(one, Carried):
                if (self._mover(one), self._lane(place)) != (rank, queue) or self._move(place).mover != ENGINE:
                    pad = ARRIVED if one.target == rank else TOLD
                    events.append(Event(pad, rank, ("move", place, rank), self._move(place).mover != ENGINE))
                continue
            done = [Event(SUMMED, one.rank, ("sum", place, each.index)) for each in self.sums[place]]
            events += done if one.rank == rank else [self._told(at, done, rank)]
        return events

    def _told(self, at: int, ready: list[Event], rank: int) -> Event:
        """What a peer hears when all of it has happened: somebody waits for it there, and tells."""
        source = ready[0].rank
        event = Event(TOLD, rank, ("told", source, rank, *(event.what for event in ready)))
        if event not in self.numbers.signals:
            tell = Copy(
                name=f"tell.{source}-{rank}.{len(self.tells)}",
                rank=source,
                queue=TELLERS,
                waits=self.numbers.waits(ready),
                notifies=(Notify(TOLD, rank, self.numbers.number(event)),),
                sources=(),
                destinations=(),
            )
            self.tells.append((at, tell))
        return event

    def _of_rank(self, rank: int) -> Iterator[Operation | Chunk]:
        """Its tiles in the order in which they are sent, then what it moves and adds."""
        if self.size == 1 and self.rows:
            whole = (0, self.rows)
            yield Chunk(name=f"multiply.{rank}", rank=rank, rows=whole, region=Region(Y, rank, whole, (0, self.cols)))
        for hole, rows in enumerate(self.holes[rank]):
            part = Region(PARTIAL, rank, rows, (0, self.cols))
            notifies = self.numbers.notifies(("tiles", rank, hole))
            yield Chunk(name=f"multiply.{rank}.{rows[0]}", rank=rank, rows=rows, region=part, notifies=notifies)
        ahead = [one for one in self.carried if self._mover(one) == rank and self._move(one.at).mover != ENGINE]
        yield from map(self._carry, ahead)  # they wait for tiles only, and peers for them
        for one in self.provenance.done:
            yield from (tell for at, tell in self.tells if at == one.at and tell.rank == rank)
            if isinstance(one, Added):
                yield from (self._reduce(each) for each in self.sums[one.at] if one.rank == rank)
            elif self._mover(one) == rank and one not in ahead:
                yield self._carry(one)
        yield from (self._reduce(each) for each in self.ends[rank])
        yield from summed_together(self.provenance, rank) if self.size > 1 else ()

    def _carry(self, one: Carried) -> Put | Get:
        mover = self._mover(one)
        kind, peer = (Put, one.target) if mover == one.source else (Get, one.source)
        told = tuple(each for rank in range(self.size) for each in self.numbers.notifies(("move", one.at, rank)))
        check_told(one.at, self._move(one.at), told)
        return kind(
            name=f"{'push' if kind is Put else 'pull'}.{mover}-{peer}.{one.at}",
            rank=mover,
            queue=self._lane(one.at),
            waits=self.waits[one.at],
            notifies=told,
            sources=tuple(self._place(part, one.source, piece.box) for piece in one.pieces for part in piece.parts),
            destinations=tuple(self._place(one.lands, one.target, piece.box) for piece in one.pieces),
        )

    def _reduce(self, one: _Sum) -> Reduce:
        result = self._result(one.rank, one.box)
        notifies = self.numbers.notifies(("sum", one.event, one.index)) if one.index != OWN else ()
        blocks = ReduceConfig()
        height, width = (hi - lo for lo, hi in (one.box.rows, one.box.cols))
        tiles = 1 if self.way == LIBRARY else -(-height // blocks.block_m) * -(-width // blocks.block_n)
        what = "move" if one.index == OWN else "sum"
        return Reduce(
            name=f"{what}.{one.rank}.{one.event}.{one.box.rows[0]}.{one.box.cols[0]}",
            rank=one.rank,
            queue=MAIN if self.way == LIBRARY else SUMS,
            waits=one.waits,
            notifies=notifies,
            operands=tuple(self._place(part, one.rank, one.box) for part in one.parts),
            out=self._place(one.kept, one.rank, one.box) if one.kept else result,
            tiles=tiles if notifies else 1,
        )

    def _place(self, part: Part, rank: int, box: Box) -> Region:
        if part.buffer == SLOTS:
            return Region(SLOTS, rank, self.slots.place(rank, part.layer, box.rows), box.cols)
        name = f"{RUNNING}.{part.layer}" if part.buffer == RUNNING else part.buffer
        return Region(name, rank, box.rows, box.cols)

    def _result(self, rank: int, box: Box) -> Region:
        first = 0 if self.provenance.reduction.everywhere else self.provenance.wanted(rank).rows[0]
        return Region(Y, rank, shifted(box.rows, -first), box.cols)

    def _goals(self, rank: int, held: tuple[Range, ...]) -> Iterator[Goal]:
        for piece in self.provenance.ends[rank]:
            terms = tuple(held[one] for part in piece.parts for one in partials(part.value))
            (row, _), (col, _) = piece.box.rows, piece.box.cols
            yield Goal(self._result(rank, piece.box), product(A, B), row, col, terms)
        for rows, result in results_together(self.provenance, rank):
            yield Goal(result, product(A, B), rows[0], 0, held)

    def _queues(self, steps: Iterable[Operation | Chunk]) -> Iterator[Queue]:
        names = dict.fromkeys(step.queue for step in steps if not isinstance(step, Chunk))
        behind = (TILES, PUSHES) if PUSHES in names else (TILES,)
        for name in names:
            if name in (SUMS, PUSHES):
                yield Queue(name, ISSUE, after=behind if name == SUMS and self.way == BEHIND else ())
            elif name != TILES:  # the library's calls hold SMs that kernels may need
                kernels = (TILES, SUMS, PUSHES) if self.provenance.together else (TILES,)
                yield Queue(name, COMPLETE, after=kernels if name == MAIN else ())


def _holes(reads: list[Range]) -> list[Range]:
    """The rows between all edges of what is read, in the order of first reading."""
    edges = sorted({edge for rows in reads for edge in rows})
    found = list(pairwise(edges))
    first = {hole: next((at for at, rows in enumerate(reads) if rows[0] <= hole[0] < rows[1]), -1) for hole in found}
    return sorted((hole for hole in found if first[hole] >= 0), key=lambda hole: first[hole])
