"""All-gather of row shards, `x [S, k]` on every rank -> all of `a [m, k]` on every rank, from a list of moves.

Every dependence becomes a signal. A move signals its destination, whose tiles wait for it, and every other rank that
has a move which depends on it. A rank whose own shard is read where peers can reach it first copies it there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count, pairwise

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.promise import GATHERED_OUT
from overweave.ir.schedule import Buffer, Copy, Get, Given, Goal, Notify, Put, Queue, Range, Region, SignalPad, Wait
from overweave.ir.schedule import Collective as LibraryCollective
from overweave.ir.shards import owned_rows, rows_of
from overweave.schedules.communication import (
    ARRIVED,
    COMPLETE,
    GATHERED,
    ISSUE,
    MAIN,
    TILES,
    A,
    Chunk,
    Communication,
    X,
    common,
    is_empty,
    region,
    used,
)
from overweave.schedules.moves import moves as chunks
from overweave.schedules.moves.back_ends import ENGINE, PUSHES, check_told, move_obstacle, queue_of
from overweave.schedules.moves.moves import MOST_LANES, Box, Gather, Held, Move, earlier
from overweave.schedules.moves.signal_numbers import TOLD, Event, SignalNumbers

STAGE = -1  # stands for the copy of a rank's own shard among the moves that a move depends on


class _Plan(Struct):
    """What the moves of a gather need of each other. needs: of each move and rank that runs it, the events."""

    gather: Gather
    whole: Box
    held: list[Held]
    needs: dict[tuple[int, int], list[int]]
    staged: set[int]
    from_x: set[int]  # moves that read the caller's tensor
    arrivals: dict[tuple[int, int], Event]  # of a move and the rank whose tiles wait for it
    numbers: SignalNumbers

    @property
    def size(self) -> int:
        return self.gather.world_size

    def waits(self, at: int, rank: int) -> tuple[Wait, ...]:
        """Of a rank's part of a move. What arrives there has one signal, for its tiles and for moves."""
        needed = self.needs.get((at, rank), ())
        events = (self.arrivals.get((one, rank)) or Event(TOLD, rank, ("move", one)) for one in needed)
        return self.numbers.waits(events)

    def arrived(self, rank: int, bringers: Iterable[int]) -> tuple[Wait, ...]:
        """What a rank's tiles wait for before they read what these moves bring."""
        return self.numbers.waits(self.arrivals[at, rank] for at in bringers if (at, rank) in self.arrivals)

    def notifies(self, event: int, of_rank: int | None = None) -> tuple[Notify, ...]:
        """To all ranks that wait for a move, or for one rank's part of it."""
        return tuple(one for one in self.numbers.notifies(("move", event)) if of_rank in (None, one.rank))


def chunked_gather(gather: Gather, rows: int, cols: int, returns_gathered: bool = False) -> Communication:
    """The moves of a gather of `[rows, cols]`, with a `Chunk` where each part that arrives together may be used.

    returns_gathered: once all has arrived it is copied to output `gathered_out`.
    Raises ScheduleError for moves that read what is not there, bring something twice, or leave something out.
    """
    plan = _planned(gather, Box((0, rows), (0, cols)))
    longest = max(rows_of(one.owned) for one in plan.held)
    buffers = _Buffers(
        Buffer(X, longest, cols, "input"),
        Buffer(GATHERED, rows, cols, "local" if _is_all_by_library(gather) else "symmetric"),
        Buffer(GATHERED_OUT, rows, cols, "output"),
    )
    ranks = range(gather.world_size)
    steps: list[Put | Get | Copy | LibraryCollective | Chunk] = []
    for rank in ranks:
        steps += _moves(plan, buffers, rank)
        steps += _uses(plan, buffers, rank)
        steps += [_collect(plan, buffers, rank)] if returns_gathered and rows else []
    names = dict.fromkeys(step.queue for step in steps if not isinstance(step, Chunk) and step.queue != TILES)
    queues = [Queue(PUSHES, ISSUE) if name == PUSHES else _stream(name) for name in names]
    kept = (buffers.x, buffers.gathered, *((buffers.out,) if returns_gathered else ()))
    return Communication(
        world_size=gather.world_size,
        buffers=used(kept, steps),
        pads=tuple(SignalPad(pad, size) for pad, size in plan.numbers.sizes()),
        queues=tuple(queues),
        given=tuple(
            Given(region(buffers.x, rank, plan.held[rank].place(rows)), A, rows[0], 0)
            for rank in ranks
            for rows in plan.held[rank].owned
            if not is_empty(rows)
        ),
        goal=tuple(Goal(region(buffers.out, rank, (0, rows)), A, 0, 0) for rank in ranks if returns_gathered and rows),
        steps=tuple(steps),
    )


def _is_all_by_library(gather: Gather) -> bool:
    return all(isinstance(move, chunks.Collective) for move in gather.moves)


def _stream(name: str) -> Queue:
    return Queue(name, COMPLETE, after=(TILES,) if name == MAIN else ())


class _Buffers(Struct, frozen=True):
    x: Buffer
    gathered: Buffer
    out: Buffer


def _planned(gather: Gather, whole: Box) -> _Plan:
    ranks = range(gather.world_size)
    owned = [owned_rows(whole.rows[1], gather.world_size, rank, gather.ranges) for rank in ranks]
    held = [Held(rank, rows, whole.cols, []) for rank, rows in enumerate(owned)]
    plan = _Plan(gather, whole, held, {}, set(), set(), {}, SignalNumbers())
    places = gather.places()
    for at, move in enumerate(gather.moves):
        _check_move(plan, at, move)
        after = [earlier(places, at, one) for one in move.after]
        if isinstance(move, chunks.Collective):
            _note_collective(plan, at, move, after)
        else:
            _note_move(plan, at, move, after)
    for one in held:
        one.check_whole(whole)
    _number(plan)
    return plan


def _check_move(plan: _Plan, at: int, move: Move) -> None:
    ranks = range(plan.size)
    asked = f"move {at} of a gather of {plan.whole} on {plan.size} ranks"
    if isinstance(move, chunks.Collective):
        own = zip(move.chunks, plan.held, strict=False)
        if len(move.chunks) != plan.size or any(not one.owns(chunk.rows) for chunk, one in own):
            raise ScheduleError(asked, "its chunks are not one of each rank's own shard", "Give one for each rank")
        if any(_box(plan, chunk).cols != plan.whole.cols for chunk in move.chunks):
            raise ScheduleError(asked, "its chunks are parts of rows", "Let the library gather whole rows")
        return
    if move.rank not in ranks or move.peer not in ranks or move.rank == move.peer:
        raise ScheduleError(asked, f"it moves between ranks {move.rank} and {move.peer}", "Name two ranks of the group")
    box = _box(plan, move.chunk)
    if not _lies_in(box, plan.whole) or not box.area:
        raise ScheduleError(
            asked, f"chunk {move.chunk} is empty, or not inside the tensor", "Name rows and columns of it"
        )
    lanes = max(MOST_LANES, plan.size)
    if not 0 <= move.lane < lanes:
        raise ScheduleError(asked, f"lane {move.lane}", f"Use lanes 0 to {lanes - 1}")


def _note_move(plan: _Plan, at: int, move: chunks.Put | chunks.Get, after: list[int]) -> None:
    source, target = (move.rank, move.peer) if isinstance(move, chunks.Put) else (move.peer, move.rank)
    box = _box(plan, move.chunk)
    is_own, arrived = plan.held[source].sources(at, box)
    if found := move_obstacle(move, box, plan.whole, is_own and not arrived):
        raise ScheduleError(f"move {at}: carry {box} by mover={move.mover}", found, "Use mover=copy_engine")
    plan.held[target].take(at, box)
    if is_own and (arrived or isinstance(move, chunks.Get)):
        plan.staged.add(source)
        arrived = [STAGE - source, *arrived]
    elif is_own:
        plan.from_x.add(at)
    plan.needs[at, move.rank] = _not_in_order(plan, at, move.rank, [*arrived, *after])


def _note_collective(plan: _Plan, at: int, move: chunks.Collective, after: list[int]) -> None:
    for rank, held in enumerate(plan.held):
        plan.needs[at, rank] = _not_in_order(plan, at, rank, after)
        plan.staged.add(rank)
        for peer, chunk in enumerate(move.chunks):
            if peer != rank:
                held.take(at, _box(plan, chunk))


def _number(plan: _Plan) -> None:
    """A signal for each event: arrivals by their place in the tensor, so that neighbours make a range.

    Tiles need none of what the library brings, since it ends before they begin.
    """
    moves = plan.gather.moves
    for rank, held in enumerate(plan.held):
        put = [(box.rows[0], box.cols[0], at) for at, box in held.arrived if _lane(moves[at], rank) != MAIN]
        for _, _, at in sorted(put):
            plan.arrivals[at, rank] = Event(ARRIVED, rank, ("move", at))
            plan.numbers.number(plan.arrivals[at, rank])
    for at, rank in plan.needs:
        plan.waits(at, rank)


def _lane(move: Move, rank: int) -> int | str | None:
    """The lane of a rank in which a move is carried; MAIN for the library's, None for another rank's move, and for a
    kernel's, which orders nothing."""
    if isinstance(move, chunks.Collective):
        return MAIN
    return move.lane if move.rank == rank and move.mover == ENGINE else None


def _not_in_order(plan: _Plan, at: int, rank: int, events: list[int]) -> list[int]:
    """Without those that the order of the rank's own lane implies."""
    moves = plan.gather.moves
    lane = _lane(moves[at], rank)
    implied = [event for event in events if event >= 0 and lane is not None and _lane(moves[event], rank) == lane]
    return [event for event in dict.fromkeys(events) if event not in implied]


def _moves(plan: _Plan, buffers: _Buffers, rank: int) -> Iterator[Put | Get | Copy | LibraryCollective]:
    """A rank's moves in launch order, after what stages its own shard."""
    own = plan.held[rank]
    rest = _not_gathered(plan, rank)
    carried = (move for move in plan.gather.moves if not isinstance(move, chunks.Collective))
    lanes = {move.lane for move in carried if move.mover == ENGINE}
    numbers: Counter[int] = Counter()  # of the moves between this rank and a peer
    if rank in plan.staged and rest:
        yield Copy(
            name=f"stage.{rank}",
            rank=rank,
            queue=MAIN,
            notifies=plan.notifies(STAGE - rank),
            sources=tuple(region(buffers.x, rank, own.place(rows)) for rows in rest),
            destinations=tuple(region(buffers.gathered, rank, rows) for rows in rest),
        )
    for at in plan.gather.of_rank(rank):
        move, waits = plan.gather.moves[at], plan.waits(at, rank)
        if isinstance(move, chunks.Collective):
            yield _collective(plan, at, rank)
            continue
        box, told = _box(plan, move.chunk), plan.notifies(at)
        check_told(at, move, told)
        kind, source, target = (Put, rank, move.peer) if isinstance(move, chunks.Put) else (Get, move.peer, rank)
        read = own.place(box.rows) if at in plan.from_x else box.rows
        number, numbers[move.peer] = numbers[move.peer], numbers[move.peer] + 1
        yield kind(
            name=f"{'push' if kind is Put else 'pull'}.{rank}-{move.peer}.{number}",
            rank=rank,
            queue=queue_of(move, len(lanes) > 1),
            waits=waits,
            notifies=told,
            sources=(Region(X if at in plan.from_x else GATHERED, source, read, box.cols),),
            destinations=(Region(GATHERED, target, box.rows, box.cols),),
        )


def _not_gathered(plan: _Plan, rank: int) -> list[Range]:
    """The rows of a rank's own ranges that the library does not put among the gathered ones."""
    given = [move.chunks[rank].rows for move in plan.gather.moves if isinstance(move, chunks.Collective)]
    return [rows for own in plan.held[rank].owned for rows in _without(own, given)]


def _without(whole: Range, parts: Iterable[Range]) -> list[Range]:
    """The rows of a range that lie in none of its parts, which do not overlap."""
    inside = sorted(rows for rows in (common(whole, part) for part in parts) if not is_empty(rows))
    ends, begins = [whole[0], *(rows[1] for rows in inside)], [*(rows[0] for rows in inside), whole[1]]
    return [rows for rows in zip(ends, begins, strict=True) if not is_empty(rows)]


def _collective(plan: _Plan, at: int, rank: int) -> LibraryCollective:
    move = plan.gather.moves[at]
    assert isinstance(move, chunks.Collective)
    boxes = [_box(plan, chunk) for chunk in move.chunks]
    return LibraryCollective(
        name=f"all_gather.{rank}.{at}",
        rank=rank,
        queue=MAIN,
        waits=plan.waits(at, rank),
        notifies=plan.notifies(at, rank),
        function="all_gather",
        label=f"all_gather.{at}",
        ranks=tuple(range(plan.size)),
        sources=(Region(X, rank, plan.held[rank].place(boxes[rank].rows), boxes[rank].cols),),
        destinations=tuple(Region(GATHERED, rank, box.rows, box.cols) for box in boxes),
    )


def _uses(plan: _Plan, buffers: _Buffers, rank: int) -> list[Chunk]:
    """The own shard, then all other rows in the order in which the last part of them arrives."""
    held = plan.held[rank]
    found: list[tuple[int, int, Chunk]] = []
    is_gathered = any(isinstance(move, chunks.Collective) for move in plan.gather.moves)
    for at, rows in enumerate(held.owned):
        own = region(buffers.gathered, rank, rows) if is_gathered else region(buffers.x, rank, held.place(rows))
        name = f"multiply.{rank}.own.{at}" if at else f"multiply.{rank}.own"
        if not is_empty(rows):
            found.append((STAGE, rows[0], Chunk(name=name, rank=rank, rows=rows, region=own)))
    cuts = {edge for _, box in held.arrived for edge in box.rows}
    numbers = [count() for _ in plan.held]
    for rows in pairwise(sorted(cuts)):
        bringers = [at for at, box in held.arrived if not is_empty(common(box.rows, rows))]
        if bringers:
            waits = plan.arrived(rank, bringers)
            owner = next(one.rank for one in plan.held if one.owns((rows[0], rows[0] + 1)))
            name, part = f"multiply.{rank}-{owner}.{next(numbers[owner])}", region(buffers.gathered, rank, rows)
            use = Chunk(name=name, rank=rank, rows=rows, region=part, waits=waits)
            found.append((max(bringers), rows[0], use))
    found.sort(key=lambda one: (one[0] if one[2].waits else STAGE, one[1]))
    return _united(use for _, _, use in found)


def _united(uses: Iterable[Chunk]) -> list[Chunk]:
    """The same, neighbours in one buffer that wait for nothing as one: what the library gathered is used at once."""
    found: list[Chunk] = []
    for use in uses:
        last = found[-1] if found else None
        if last and not (last.waits or use.waits) and _are_neighbours(last, use):
            rows, read = (last.rows[0], use.rows[1]), (last.region.rows[0], use.region.rows[1])
            both = replace(last.region, rows=read)
            found[-1] = replace(last, name=f"multiply.{use.rank}", rows=rows, region=both)
        else:
            found.append(use)
    return found


def _are_neighbours(one: Chunk, other: Chunk) -> bool:
    return one.rows[1] == other.rows[0] and one.region.buffer == other.region.buffer


def _collect(plan: _Plan, buffers: _Buffers, rank: int) -> Copy:
    """Everything that has arrived, and the own shard, to the caller's output."""
    held = plan.held[rank]
    # Of a rank's own rows, those that the caller alone has.
    only = [] if rank in plan.staged else [rows for rows in held.owned if not is_empty(rows)]
    parts = [(region(buffers.x, rank, held.place(rows)), rows) for rows in only]
    parts += [(region(buffers.gathered, rank, rows), rows) for rows in _without(plan.whole.rows, only)]
    return Copy(
        name=f"collect.{rank}",
        rank=rank,
        queue=MAIN,
        waits=plan.arrived(rank, (at for at, _ in plan.held[rank].arrived)),
        sources=tuple(source for source, _ in parts),
        destinations=tuple(region(buffers.out, rank, rows) for _, rows in parts),
    )


def _box(plan: _Plan, chunk: chunks.Chunk) -> Box:
    return Box(chunk.rows, chunk.cols or plan.whole.cols)


def _lies_in(box: Box, outer: Box) -> bool:
    """Empty ones lie anywhere within its rows."""
    return all(
        lo <= one[0] <= one[1] <= hi
        for (lo, hi), one in zip((outer.rows, outer.cols), (box.rows, box.cols), strict=True)
    )
