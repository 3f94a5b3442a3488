"""From a list of moves and sums to operations: tiles write what is sent in the order of sending, sums follow arrivals.

Where sums run is settled by what they wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.dtype import SUM_DTYPE
from overweave.ir.plan import LIBRARY, ReduceConfig
from overweave.ir.schedule import Buffer, Clear, Collective, Get, Goal, Operation, Put, Range, Reduce, ReducePut, Region
from overweave.ir.tensors import product
from overweave.schedules.communication import (
    COMPUTED,
    EXCHANGES,
    MAIN,
    PARTIAL,
    PUSHES,
    RUNNING,
    SLOTS,
    SUMS,
    TOTAL,
    A,
    B,
    Communication,
    MatmulChunk,
    Y,
    common,
    communicated,
    in_parts,
    is_empty,
    queues_of,
    shifted,
    stored_at_peers,
    united,
)
from overweave.schedules.moves import moves as chunks
from overweave.schedules.moves.library_calls import library_calls, part_of
from overweave.schedules.moves.moves import (
    ENGINE,
    Box,
    Reduction,
    earlier,
    is_by_library,
    move_obstacle,
    queue_of,
    several_lanes,
)
from overweave.schedules.moves.provenance import (
    OWN,
    Added,
    BufferedValue,
    Carried,
    Provenance,
    SourcedRectangle,
    partials,
    trace_provenance,
)
from overweave.schedules.moves.transfers import in_order_of
from overweave.schedules.signals import fits_tile_row, with_signals

NOWHERE = Box((0, 0), (0, 0))


class Placing(Struct, frozen=True):
    """How sums are made. blocks: the tiles of a kernel that sums. by_library: the library does. are_behind: a kernel
    that sums starts behind the tiles, for whose last ones it waits anyway. is_one_wave: all tiles
    of a rank run at once, so that a kernel that pushes is launched behind them. tiles_end_in: as of Provenance.
    is_gathered: partials of one library call lie side by side, where it reads them; else all lie where their rows do.
    """

    blocks: ReduceConfig = ReduceConfig()
    by_library: bool = False
    are_behind: bool = False
    is_one_wave: bool = False
    tiles_end_in: str = Y
    is_gathered: bool = False


def reduced(
    reduction: Reduction,
    size: tuple[int, int],
    held: tuple[Range, ...],
    parts: Mapping[str, int],
    how: Placing = Placing(),  # noqa: B008 - frozen
    only: Sequence[int] = (),
) -> Communication:
    """As `chunked_reduction`, with its signals, sums where they can run, and what tiles carry stored at peers.

    size: rows and columns. parts: rows that a queue's kernel moves between two signals.
    """
    made = chunked_reduction(reduction, *size, held, how, only)
    made = replace(made, queues=queues_of(made.steps, sums_behind=how.are_behind))
    return _with_placed_sums(stored_at_peers(in_parts(made, parts)), how)


def chunked_reduction(
    reduction: Reduction,
    rows: int,
    cols: int,
    held: tuple[Range, ...],
    how: Placing = Placing(),  # noqa: B008 - frozen
    only: Sequence[int] = (),
) -> Communication:
    """The moves of a reduction of `[rows, cols]`, with a `MatmulChunk` where each part of a partial is written.

    held: the range of the reduced axis that each rank's partial holds. only: as of a Split. Raises ScheduleError for
    moves that leave a partial out, add one twice, or add differently on two ranks that end with the same.
    """
    ranks = only or range(reduction.world_size)
    made = _Lowering(trace_provenance(reduction.of_ranks(ranks), rows, cols, how.tiles_end_in, ranks), how)
    steps = [step for rank in ranks for step in made.of_rank(rank)]
    y = Buffer(Y, rows if reduction.everywhere else -(-rows // reduction.world_size), cols, "output")
    goal = (goal for rank in ranks for goal in made.goals(rank, held))
    communication = communicated(reduction.world_size, steps, (y,), goal=goal)
    in_fp32 = {SLOTS} if made.is_unordered else set[str]()
    buffers = (replace(one, dtype=SUM_DTYPE) if one.name in in_fp32 else one for one in communication.buffers)
    return replace(communication, buffers=tuple(buffers), behind=made.behind)


class _Lowering:
    """The operations of one list at one size. is_unordered: what arrives is added then. behind: as of a Communication.

    carried: what moves, without what is read in place. calls: of the library, by the position of their first move.
    """

    def __init__(self, provenance: Provenance, how: Placing) -> None:
        self.how = how
        self.provenance, self.reduction, self.whole = provenance, provenance.reduction, provenance.whole
        self.size, self.has_lanes = self.reduction.world_size, several_lanes(self.reduction)
        self.carried = [one for one in provenance.done if isinstance(one, Carried) and one.lands.rank is None]
        self.calls, self.carried_at = library_calls(self.reduction), {one.at: one for one in self.carried}
        self.is_unordered = any(isinstance(move, chunks.Put) and move.adds for move in self.reduction.moves)
        self.is_read_by_peers = any(isinstance(move, chunks.Get) for move in self.reduction.moves)
        sums = [one for one in provenance.done if isinstance(one, Added)]
        # What a rank's own tiles write: partials, and sums that they make.
        self.own = [{OWN, *(one.at for one in sums if one.by_tiles and one.rank == rank)} for rank in range(self.size)]
        for one in self.carried:
            self._check_mover(one)
        # What the library alone adds everywhere it adds in place; a kernel stores all of a tensor in one buffer.
        has_calls_alone = all(isinstance(one, chunks.Collective) for one in self.reduction.moves)
        self.summed_in = Y if self.reduction.everywhere and has_calls_alone else PARTIAL
        self.library = self._library_places()
        firsts = zip(chain(*self.provenance.together.values()), chain(*self.library.values()), strict=True)
        self.tops = {rows[0]: place[0] for rows, place in firsts if not is_empty(rows)}
        self.holes = {rank: in_order_of(self._reads(rank)) for rank in provenance.ranks}
        self.slots = ArrivalLayout.of(self.carried, self.size)
        self.sums = {one.at: list(self._sums(one)) for one in sums}
        self.behind: dict[str, tuple[Region, ...]] = {}

    def of_rank(self, rank: int) -> Iterator[Operation | MatmulChunk]:
        """What it moves, behind the tiles that write it, and adds, behind all tiles; what the library sums is last."""
        left = self._tiles(rank)
        if self.is_unordered and (height := sum(hi - lo for lo, hi in self.slots.ranges[rank])):
            cleared = Region(SLOTS, rank, (0, height), self.whole.cols)
            yield Clear(name=f"clear.{rank}", rank=rank, queue=MAIN, destinations=(cleared,))
        if self.is_read_by_peers:  # peers come for what tiles write, and must not wait for moves
            yield from _taken(left, left)
        mine = [one for one in self.carried if self._move(one).rank == rank]
        ahead = [one for one in mine if self._move(one).mover not in (ENGINE, LIBRARY)]
        for move in ahead:  # they wait for tiles only, and peers for them
            yield from _taken(left, _up_to(left, move))
            yield self._carry(move)
        for one in self.provenance.done:
            if isinstance(one, Added):
                yield from _taken(left, left) if one.rank == rank else ()
                yield from (self._named_behind((one.at,), each) for each in self.sums[one.at] if each.rank == rank)
            elif is_by_library(self._move(one)):
                call = self.calls.get(one.at)
                if call is not None and rank in call.ranks:
                    for put in (each for each in mine if each.at in call.puts.values()):
                        yield from _taken(left, _up_to(left, put))
                    part = part_of(call, rank, one.at, self._ends, self._place(one.lands, rank, NOWHERE))
                    yield self._named_behind(call.puts.values(), part)
            elif one in mine and one not in ahead:
                yield from _taken(left, _up_to(left, one)) if self._is_put(one) else ()
                yield self._named_behind((one.at,), self._carry(one))
        yield from _taken(left, [rows for rows in left if rows[0] not in self.tops])
        yield from self._moved_at_the_end(rank)
        yield from self._summed_together(rank, left) if self.size > 1 else ()
        yield from _taken(left, left)

    def _tiles(self, rank: int) -> dict[Range, MatmulChunk]:
        """By their rows, in the order in which they are sent, but for those of tiles that add."""
        holes = [self.whole.rows] if self.size == 1 and self.whole.rows[1] else self.holes[rank]
        sums = (
            step for each in self.sums.values() for step in each if isinstance(step, MatmulChunk) and step.rank == rank
        )
        added = {step.rows for step in sums}
        found: dict[Range, MatmulChunk] = {}
        for rows in (one for one in holes if one not in added):
            first = self.tops.get(rows[0], rows[0])
            out = Y if self.size == 1 else self.summed_in if rows[0] in self.tops else PARTIAL
            place = Region(out, rank, shifted(rows, first - rows[0]), self.whole.cols)
            found[rows] = MatmulChunk(name=f"multiply.{rank}.{rows[0]}", rank=rank, rows=rows, region=place)
        return found

    def goals(self, rank: int, held: tuple[Range, ...]) -> Iterator[Goal]:
        """What a rank has at the end, in the order in which it was added."""
        for piece in self.provenance.ends[rank]:
            added = [one for part in piece.parts for one in partials(part.value)]
            terms = tuple(held[one] for one in (sorted(added) if self.is_unordered else added))
            out, (first, col) = self._result(rank, piece.box), (piece.box.rows[0], piece.box.cols[0])
            yield Goal(out, product(A, B), first, col, terms, self.is_unordered)
        together = self.provenance.together.values()
        wanted = chain(*together) if self.reduction.everywhere else (rows[rank] for rows in together)
        for rows in united(sorted(wanted)):
            yield Goal(self._result(rank, Box(rows, self.whole.cols)), product(A, B), rows[0], 0, held)

    def _move(self, one: Carried) -> chunks.Put | chunks.Get:
        move = self.reduction.moves[one.at]
        assert isinstance(move, chunks.Put | chunks.Get)
        return move

    def _is_put(self, one: Carried) -> bool:
        return isinstance(self._move(one), chunks.Put)

    def _check_mover(self, one: Carried) -> None:
        """Raises ScheduleError where a back end cannot carry a move."""
        move = self._move(one)
        is_own = all(by in self.own[one.source] for piece in one.pieces for by in piece.by)
        if found := move_obstacle(move, one.box, self.whole, is_own, True):
            asked = f"move {one.at}: carry {one.box} by mover={move.mover}"
            raise ScheduleError(asked, found, "Use mover=copy_engine")

    def _reads(self, rank: int) -> Iterator[Range]:
        """The rows of its own partial that somebody reads, in the order of the list."""
        for one in self.provenance.done:
            if (one.source if isinstance(one, Carried) else one.rank) == rank:
                yield from (piece.box.rows for piece in one.pieces if OWN in piece.by)
        for together in self.provenance.together.values():  # rows beside each other are one matmul before one call
            yield from together if self.reduction.everywhere else united(sorted(together))

    def _sums(self, one: Added) -> Iterator[Reduce | MatmulChunk]:
        """A sum of tiles that are written apart is several. It is kept where it is passed on from, or is the result."""
        is_kept = one.kept.buffer in (RUNNING, PARTIAL) or (one.at, one.rank) in self.provenance.read
        wanted = self.provenance.wanted(one.rank)
        for piece in one.pieces:
            if not is_kept and piece.box.common(wanted) != piece.box:
                found = f"its sum of {piece.box} is neither rank {one.rank}'s result nor passed on"
                raise ScheduleError(f"add on rank {one.rank}", found, "Leave it out, or pass it on")
            met = [common(piece.box.rows, hole) for hole in self.holes[one.rank]] if OWN in piece.by else []
            for rows in sorted(part for part in met if not is_empty(part)) or [piece.box.rows]:
                box = Box(rows, piece.box.cols)
                out = self._place(one.kept, one.rank, box) if is_kept else self._result(one.rank, box)
                if one.by_tiles:
                    yield self._added_by_tiles(
                        f"multiply.{one.rank}.{rows[0]}", SourcedRectangle(box, piece.parts, piece.by), out
                    )
                else:
                    yield self._reduce(f"sum.{one.rank}.{one.at}", SourcedRectangle(box, piece.parts, piece.by), out)

    def _added_by_tiles(self, name: str, piece: SourcedRectangle, out: Region) -> MatmulChunk:
        """Own rows, whose tiles add what arrived to their products, which stand among the parts in their place."""
        own = next(at for at, part in enumerate(piece.parts) if part.value == out.rank)
        others = (part for at, part in enumerate(piece.parts) if at != own)
        addends = tuple(self._place(part, out.rank, piece.box) for part in others)
        return MatmulChunk(name=name, rank=out.rank, rows=piece.box.rows, region=out, addends=addends, place=own)

    def _moved_at_the_end(self, rank: int) -> Iterator[Reduce]:
        """What is a sum elsewhere than in the result, to the result."""
        adders = {one.rank for one in self.provenance.done if isinstance(one, Added)}
        for piece in self.provenance.ends[rank]:
            sums = (each for by in piece.by for each in self.sums.get(by, ()))
            is_there = any((each.region if isinstance(each, MatmulChunk) else each.out).buffer == Y for each in sums)
            if piece.parts[0].buffer == TOTAL and not is_there:
                move = self._reduce(f"move.{rank}.{piece.by[0]}", piece, self._result(rank, piece.box))
                if rank not in adders:  # it waits for own tiles, too, or its kernel could start before they do
                    self.behind[move.name] = (Region(PARTIAL, rank, piece.box.rows, piece.box.cols),)
                yield move

    def _reduce(self, name: str, piece: SourcedRectangle, out: Region) -> Reduce:
        blocks, (height, width) = self.how.blocks, out.shape
        return Reduce(
            name=f"{name}.{piece.box.rows[0]}.{piece.box.cols[0]}",
            rank=out.rank,
            queue=SUMS,
            operands=tuple(dict.fromkeys(self._place(part, out.rank, piece.box) for part in piece.parts)),
            out=out,
            tiles=-(-height // blocks.block_m) * -(-width // blocks.block_n),
        )

    def _carry(self, one: Carried) -> Put | Get:
        move = self._move(one)
        words = f"{move.rank}-{move.peer}.{one.at}"
        known: dict[str, Any] = {
            "rank": move.rank,
            "queue": queue_of(move, self.has_lanes),
            "sources": tuple(self._place(part, one.source, piece.box) for piece in one.pieces for part in piece.parts),
            "destinations": tuple(self._place(one.lands, one.target, piece.box) for piece in one.pieces),
        }
        if isinstance(move, chunks.Get):
            return Get(name=f"pull.{words}", **known)
        return (
            ReducePut(name=f"add.{words}", unordered=True, **known) if move.adds else Put(name=f"push.{words}", **known)
        )

    def _ends(self, at: int) -> tuple[Region, Region]:
        """What the library carries, and where it lands. Raises ScheduleError where that is not one rectangle."""
        one = self.carried_at[at]
        sources = [self._place(part, one.source, piece.box) for piece in one.pieces for part in piece.parts]
        if len(sources) != 1:
            found = f"{one.box} lies in {len(sources)} parts on rank {one.source}"
            raise ScheduleError(f"move {at}: carry it by the library", found, "Let a move carry what was added alike")
        return sources[0], self._place(one.lands, one.target, one.box)

    def _named_behind(self, moved: Iterable[int], step: Operation | MatmulChunk) -> Operation | MatmulChunk:
        """Notes what a step of some moves is to come after; sums that end a rank's result stand behind the list."""
        listed = self.reduction.moves
        named = [(at, before) for at in moved if at < len(listed) for before in listed[at].after]
        places = self.reduction.places() if named else {}
        regions: list[Region] = []
        for place in (earlier(places, at, before) for at, before in named):
            if (one := self.carried_at.get(place)) is not None:
                regions.append(self._place(one.lands, one.target, one.box))
            else:
                regions += [each.region if isinstance(each, MatmulChunk) else each.out for each in self.sums[place]]
        if regions:
            self.behind[step.name] = tuple(regions)
        return step

    def _library_places(self) -> dict[int, list[Range]]:
        """Return where the partials of each library sum's chunks lie on every rank."""
        top, places = 0, dict[int, list[Range]]()
        for at, together in self.provenance.together.items():
            places[at] = []
            for lo, hi in together:
                first = top if self.how.is_gathered and not self.reduction.everywhere else lo
                places[at].append((first, first + hi - lo))
                top += hi - lo
        return places

    def _summed_together(self, rank: int, left: dict[Range, MatmulChunk]) -> Iterator[Collective | MatmulChunk]:
        """A rank's parts of the library's calls, each behind the tiles that it sums: each shard's rows to its rank, or,
        everywhere, one call for each chunk."""
        everywhere = self.reduction.everywhere
        function: Literal["all_reduce", "reduce_scatter"] = "all_reduce" if everywhere else "reduce_scatter"
        for at, together in self.provenance.together.items():
            yield from _taken(left, [rows for rows in left if any(not is_empty(common(rows, one)) for one in together)])
            parts = tuple(Region(self.summed_in, rank, rows, self.whole.cols) for rows in self.library[at])
            for number, rows in enumerate(together if everywhere else (together[rank],)):
                sources = parts[number : number + 1] if everywhere else parts
                result = self._result(rank, Box(rows, self.whole.cols))
                if not all(one.is_empty for one in sources):
                    yield Collective(
                        name=f"{function}.{rank}.{at}.{number}",
                        rank=rank,
                        queue=MAIN,
                        function=function,
                        label=f"{function}.{at}.{number}",
                        ranks=tuple(range(self.size)),
                        sources=sources,
                        destinations=(result,),
                    )

    def _place(self, part: BufferedValue, rank: int, box: Box) -> Region:
        is_slot = part.buffer == SLOTS and box.area > 0
        rows = self.slots.place(rank, part.layer, box.rows) if is_slot else box.rows
        return Region(_buffer(part), rank if part.rank is None else part.rank, rows, box.cols)

    def _result(self, rank: int, box: Box) -> Region:
        return Region(Y, rank, shifted(box.rows, -self.provenance.wanted(rank).rows[0]), box.cols)


def _taken(left: dict[Range, MatmulChunk], due: Iterable[Range]) -> Iterator[MatmulChunk]:
    """Takes the tiles of these rows out."""
    for rows in list(due):
        yield left.pop(rows)


def _up_to(left: Iterable[Range], move: Carried) -> list[Range]:
    """The rows up to the last that a move reads."""
    read, rows = [piece.box.rows for piece in move.pieces if OWN in piece.by], list(left)
    met = [at for at, each in enumerate(rows) if any(not is_empty(common(each, one)) for one in read)]
    return rows[: met[-1] + 1 if met else 0]


def _buffer(part: BufferedValue) -> str:
    return f"{RUNNING}.{part.layer}" if part.buffer == RUNNING else part.buffer


# Where addends land on every rank, until they are added: room for the rows that arrive, no more.


class ArrivalLayout(Struct, frozen=True):
    """Where what arrives lies: of each rank, only the rows for which something does; layer by layer. stride: rows of a
    layer."""

    ranges: list[tuple[Range, ...]]
    layers: int
    stride: int

    @classmethod
    def of(cls, carried: list[Carried], ranks: int) -> ArrivalLayout:
        beside = [one for one in carried if one.lands.buffer == SLOTS]
        landed: dict[int, list[Range]] = {}
        for one in beside:
            landed.setdefault(one.target, []).append(one.box.rows)
        ranges = [united(sorted(landed.get(rank, ()))) for rank in range(ranks)]
        stride = max((sum(hi - lo for lo, hi in each) for each in ranges), default=0)
        return cls(ranges, max((one.lands.layer + 1 for one in beside), default=0), stride)

    @property
    def rows(self) -> int:
        return self.layers * self.stride

    def place(self, rank: int, layer: int, rows: Range) -> Range:
        first = layer * self.stride
        for lo, hi in self.ranges[rank]:
            if lo <= rows[0] and rows[1] <= hi:
                return shifted(rows, first - lo)
            first += hi - lo
        raise AssertionError(f"nothing arrives for rows {rows} on rank {rank}")


# Where the sums of a list of moves run: by what they wait for.
#
# In a kernel beside the tiles, where a kernel can tell what they wait for and every rank's first one waits for tiles of
# its own; behind the tiles where not every one does; and on the caller's stream, by the library, where they are of
# parts of rows, or wait for more than a kernel can tell. Where the library adds what its calls carry, sums stand among
# these on their stream, beside the tiles.


def _with_placed_sums(made: Communication, how: Placing) -> Communication:
    """The same with its signals, sums where they can run."""
    sums = [step for step in made.steps if isinstance(step, Reduce)]
    cols = {buffer.name: buffer.cols for buffer in made.buffers}
    is_whole = all(one.out.cols == (0, cols[one.out.buffer]) for one in sums)
    pushes = any(queue.name == PUSHES for queue in made.queues)  # sums beside them could hold the SMs that they need
    for is_behind in () if how.by_library or not is_whole else (True,) if pushes or how.are_behind else (False, True):
        queues = queues_of(made.steps, sums_behind=is_behind, pushes_behind=how.is_one_wave)
        placed = with_signals(replace(made, queues=queues))
        if _is_for_a_kernel(placed, is_behind):
            return placed
    has_calls = any(queue.name == EXCHANGES for queue in made.queues)
    queue = EXCHANGES if how.by_library and has_calls else MAIN
    steps = tuple(replace(one, queue=queue, tiles=1) if isinstance(one, Reduce) else one for one in made.steps)
    return with_signals(replace(made, steps=steps, queues=queues_of(steps)))


def _is_for_a_kernel(placed: Communication, is_behind: bool) -> bool:
    first: dict[int, Reduce] = {}
    for one in (step for step in placed.steps if isinstance(step, Reduce)):
        first.setdefault(one.rank, one)
        if not fits_tile_row(one.waits):
            return False
    return is_behind or all(COMPUTED in {wait.pad for wait in one.waits} for one in first.values())
