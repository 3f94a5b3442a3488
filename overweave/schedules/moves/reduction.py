"""From a list of moves and sums to operations: tiles write what is sent in the order of sending, sums follow arrivals.

Where sums run is settled by what they wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.plan import ReduceConfig
from overweave.ir.schedule import Buffer, Collective, Get, Goal, Operation, Put, Range, Reduce, Region
from overweave.ir.tensors import product
from overweave.schedules.communication import (
    COMPUTED,
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
    united,
)
from overweave.schedules.fewest_waits import fits_tile_row
from overweave.schedules.moves import moves as chunks
from overweave.schedules.moves.back_ends import ENGINE, move_obstacle, queue_of, several_lanes
from overweave.schedules.moves.moves import Box, Reduction, earlier
from overweave.schedules.moves.peer_stores import stored_at_peers
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
from overweave.schedules.signals import with_signals


def reduced(
    reduction: Reduction, rows: int, cols: int, held: tuple[Range, ...], parts: Mapping[str, int]
) -> Communication:
    """As `chunked_reduction`, with its signals, sums where they can run, and what tiles carry stored at peers.

    parts: rows that a queue's kernel moves between two signals.
    """
    made = stored_at_peers(in_parts(chunked_reduction(reduction, rows, cols, held), parts))
    return with_placed_sums(made)


def chunked_reduction(reduction: Reduction, rows: int, cols: int, held: tuple[Range, ...]) -> Communication:
    """The moves of a reduction of `[rows, cols]`, with a `MatmulChunk` where each part of a partial is written.

    held: the range of the reduced axis that each rank's partial holds. Raises ScheduleError for moves that leave a
    partial out, add one twice, or add differently on two ranks that end with the same.
    """
    made = _Lowering(trace_provenance(reduction, rows, cols))
    ranks = range(reduction.world_size)
    steps = [step for rank in ranks for step in made.of_rank(rank)]
    y = Buffer(Y, rows if reduction.everywhere else -(-rows // reduction.world_size), cols, "output")
    goal = (goal for rank in ranks for goal in made.goals(rank, held))
    return replace(communicated(reduction.world_size, steps, (y,), goal=goal), behind=made.behind)


class _Lowering:
    """The operations of one list at one size. behind: as of a Communication."""

    def __init__(self, provenance: Provenance) -> None:
        self.provenance, self.reduction, self.whole = provenance, provenance.reduction, provenance.whole
        self.size, self.has_lanes = self.reduction.world_size, several_lanes(self.reduction)
        self.carried = [one for one in provenance.done if isinstance(one, Carried)]
        for one in self.carried:
            self._check_mover(one)
        self.holes = [in_order_of(self._reads(rank)) for rank in range(self.size)]
        self.slots = ArrivalLayout.of(self.carried, self.size)
        self.sums = {one.at: list(self._sums(one)) for one in provenance.done if isinstance(one, Added)}
        self.behind: dict[str, tuple[Region, ...]] = {}

    def of_rank(self, rank: int) -> Iterator[Operation | MatmulChunk]:
        """Its tiles in the order in which they are sent, then what it moves and adds; what the library sums is last."""
        out = Y if self.size == 1 else PARTIAL
        holes = [self.whole.rows] if self.size == 1 and self.whole.rows[1] else self.holes[rank]
        for rows in holes:
            part = Region(out, rank, rows, self.whole.cols)
            yield MatmulChunk(name=f"multiply.{rank}.{rows[0]}", rank=rank, rows=rows, region=part)
        mine = [one for one in self.carried if self._move(one).rank == rank]
        ahead = [one for one in mine if self._move(one).mover != ENGINE]
        yield from map(self._carry, ahead)  # they wait for tiles only, and peers for them
        for one in self.provenance.done:
            if isinstance(one, Added):
                yield from (self._named_behind(one.at, each) for each in self.sums[one.at] if each.rank == rank)
            elif one in mine and one not in ahead:
                yield self._named_behind(one.at, self._carry(one))
        yield from self._moved_at_the_end(rank)
        yield from self._summed_together(rank) if self.size > 1 else ()

    def goals(self, rank: int, held: tuple[Range, ...]) -> Iterator[Goal]:
        """What a rank has at the end, in the order in which it was added."""
        for piece in self.provenance.ends[rank]:
            terms = tuple(held[one] for part in piece.parts for one in partials(part.value))
            yield Goal(self._result(rank, piece.box), product(A, B), piece.box.rows[0], piece.box.cols[0], terms)
        for together in self.provenance.together.values():
            for rows in self._wanted(rank, together):
                if not is_empty(rows):
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
        is_own = {part.buffer for piece in one.pieces for part in piece.parts} == {PARTIAL}
        if found := move_obstacle(move, one.box, self.whole, is_own, True):
            asked = f"move {one.at}: carry {one.box} by mover={move.mover}"
            raise ScheduleError(asked, found, "Use mover=copy_engine")

    def _reads(self, rank: int) -> Iterator[Range]:
        """The rows of its own partial that somebody reads, in the order of the list."""
        for one in self.provenance.done:
            if (one.source if isinstance(one, Carried) else one.rank) == rank:
                yield from (piece.box.rows for piece in one.pieces if OWN in piece.by)
        yield from (rows for together in self.provenance.together.values() for rows in together)

    def _sums(self, one: Added) -> Iterator[Reduce]:
        """A sum of tiles that are written apart is several. It is kept where it is passed on from, or is the result."""
        is_kept = one.kept.buffer == RUNNING or (one.at, one.rank) in self.provenance.read
        wanted = self.provenance.wanted(one.rank)
        for piece in one.pieces:
            if not is_kept and piece.box.common(wanted) != piece.box:
                found = f"its sum of {piece.box} is neither rank {one.rank}'s result nor passed on"
                raise ScheduleError(f"add on rank {one.rank}", found, "Leave it out, or pass it on")
            met = [common(piece.box.rows, hole) for hole in self.holes[one.rank]] if OWN in piece.by else []
            for rows in sorted(part for part in met if not is_empty(part)) or [piece.box.rows]:
                box = Box(rows, piece.box.cols)
                out = self._place(one.kept, one.rank, box) if is_kept else self._result(one.rank, box)
                yield self._reduce(f"sum.{one.rank}.{one.at}", SourcedRectangle(box, piece.parts, piece.by), out)

    def _moved_at_the_end(self, rank: int) -> Iterator[Reduce]:
        """What is a sum elsewhere than in the result, to the result."""
        for piece in self.provenance.ends[rank]:
            is_there = any(each.out.buffer == Y for by in piece.by for each in self.sums.get(by, ()))
            if piece.parts[0].buffer == TOTAL and not is_there:
                yield self._reduce(f"move.{rank}.{piece.by[0]}", piece, self._result(rank, piece.box))

    def _reduce(self, name: str, piece: SourcedRectangle, out: Region) -> Reduce:
        blocks, (height, width) = ReduceConfig(), out.shape
        return Reduce(
            name=f"{name}.{piece.box.rows[0]}.{piece.box.cols[0]}",
            rank=out.rank,
            queue=SUMS,
            operands=tuple(self._place(part, out.rank, piece.box) for part in piece.parts),
            out=out,
            tiles=-(-height // blocks.block_m) * -(-width // blocks.block_n),
        )

    def _carry(self, one: Carried) -> Put | Get:
        move = self._move(one)
        kind = Put if self._is_put(one) else Get
        return kind(
            name=f"{'push' if kind is Put else 'pull'}.{move.rank}-{move.peer}.{one.at}",
            rank=move.rank,
            queue=queue_of(move, self.has_lanes),
            sources=tuple(self._place(part, one.source, piece.box) for piece in one.pieces for part in piece.parts),
            destinations=tuple(self._place(one.lands, one.target, piece.box) for piece in one.pieces),
        )

    def _named_behind(self, at: int, step: Operation) -> Operation:
        """Notes what a step is to come after; sums that end a rank's result stand behind the list."""
        after = self.reduction.moves[at].after if at < len(self.reduction.moves) else ()
        places = self.reduction.places() if after else {}
        landed = {one.at: (self._place(one.lands, one.target, one.box),) for one in self.carried} if after else {}
        regions: list[Region] = []
        for place in (earlier(places, at, named) for named in after):
            regions += landed.get(place, ()) or [each.out for each in self.sums[place]]
        if regions:
            self.behind[step.name] = tuple(regions)
        return step

    def _summed_together(self, rank: int) -> Iterator[Collective]:
        """A rank's parts of the library's calls: each shard's rows to its rank, or, everywhere, one call for each."""
        for at, together in self.provenance.together.items():
            for number, rows in enumerate(self._wanted(rank, together)):
                sources = (rows,) if self.reduction.everywhere else together
                if not all(map(is_empty, sources)):
                    function = "all_reduce" if self.reduction.everywhere else "reduce_scatter"
                    yield Collective(
                        name=f"{function}.{rank}.{at}.{number}",
                        rank=rank,
                        queue=MAIN,
                        function="all_reduce" if self.reduction.everywhere else "reduce_scatter",
                        label=f"{function}.{at}.{number}",
                        ranks=tuple(range(self.size)),
                        sources=tuple(Region(PARTIAL, rank, one, self.whole.cols) for one in sources),
                        destinations=(self._result(rank, Box(rows, self.whole.cols)),),
                    )

    def _wanted(self, rank: int, together: tuple[Range, ...]) -> tuple[Range, ...]:
        """Of the rows of all shards that the library sums, those that a rank wants: its own, or all."""
        return together if self.reduction.everywhere else (together[rank],)

    def _place(self, part: BufferedValue, rank: int, box: Box) -> Region:
        rows = self.slots.place(rank, part.layer, box.rows) if part.buffer == SLOTS else box.rows
        return Region(_buffer(part), rank, rows, box.cols)

    def _result(self, rank: int, box: Box) -> Region:
        return Region(Y, rank, shifted(box.rows, -self.provenance.wanted(rank).rows[0]), box.cols)


def _buffer(part: BufferedValue) -> str:
    return f"{RUNNING}.{part.layer}" if part.buffer == RUNNING else part.buffer


# Where addends land on every rank, until they are added: room for the rows that arrive, no more.


class ArrivalLayout(Struct, frozen=True):
    """Where what arrives lies: of each rank, only the rows for which something does; layer by layer."""

    ranges: list[tuple[Range, ...]]
    layers: int

    @classmethod
    def of(cls, carried: list[Carried], ranks: int) -> ArrivalLayout:
        beside = [one for one in carried if one.lands.buffer == SLOTS]
        ranges = [united(sorted(one.box.rows for one in beside if one.target == rank)) for rank in range(ranks)]
        return cls(ranges, max((one.lands.layer + 1 for one in beside), default=0))

    @property
    def stride(self) -> int:
        """Rows of a layer."""
        return max((sum(hi - lo for lo, hi in ranges) for ranges in self.ranges), default=0)

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
# parts of rows, or wait for more than a kernel can tell.

KERNEL_COLS = 8  # the kernel that sums reads words of 16 bytes


def with_placed_sums(made: Communication) -> Communication:
    """The same with its signals, sums where they can run."""
    sums = [step for step in made.steps if isinstance(step, Reduce)]
    cols = {buffer.name: buffer.cols for buffer in made.buffers}
    is_whole = all(one.out.cols == (0, cols[one.out.buffer]) and one.out.cols[1] % KERNEL_COLS == 0 for one in sums)
    pushes = any(queue.name == PUSHES for queue in made.queues)  # sums beside them could hold the SMs that they need
    for is_behind in (True,) if pushes else (False, True):
        placed = with_signals(replace(made, queues=queues_of(made.steps, sums_behind=is_behind)))
        if is_whole and _is_for_a_kernel(placed, is_behind):
            return placed
    steps = tuple(replace(one, queue=MAIN, tiles=1) if isinstance(one, Reduce) else one for one in made.steps)
    return with_signals(replace(made, steps=steps, queues=queues_of(steps)))


def _is_for_a_kernel(placed: Communication, is_behind: bool) -> bool:
    first: dict[int, Reduce] = {}
    for one in (step for step in placed.steps if isinstance(step, Reduce)):
        first.setdefault(one.rank, one)
        if not fits_tile_row(one.waits):
            return False
    return is_behind or all(COMPUTED in {wait.pad for wait in one.waits} for one in first.values())
