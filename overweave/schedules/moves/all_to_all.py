"""From a list of moves to an all-to-all of row blocks, before a kernel that reads them or behind one that writes them.

A tensor `[rows, cols]` has one block for each rank, all equally long, and block p of rank s becomes block s of rank p.
What rank p holds afterwards is a tensor of its own, called `a.p`. A chunk names rows as their sender has them, and
lands where its block does. Nothing is passed on: a move waits for tiles that write it, and for what it is to come
after. What the library carries does so on the caller's stream: tiles begin when it has ended, or it when they have.
Where the library carries everything, it carries the own block too, straight to where that is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from msgspec import Struct

from overweave.errors import InputError, ScheduleError
from overweave.ir.schedule import (
    Buffer,
    Copy,
    Given,
    Goal,
    Operation,
    Put,
    Queue,
    Range,
    Region,
    SignalPad,
    Wait,
)
from overweave.ir.schedule import Collective as LibraryCollective
from overweave.ir.shards import shard_rows
from overweave.ir.tensors import received
from overweave.schedules.communication import (
    ARRIVED,
    COMPLETE,
    COMPUTED,
    GATHERED,
    ISSUE,
    MAIN,
    TILES,
    A,
    Chunk,
    Communication,
    X,
    Y,
    common,
    is_empty,
    region,
    shifted,
    used,
)
from overweave.schedules.moves import moves as chunks
from overweave.schedules.moves.back_ends import ENGINE, PUSHES, REGISTERS, check_told, move_obstacle, queue_of
from overweave.schedules.moves.gather_templates import Mesh
from overweave.schedules.moves.moves import AllToAll, Box, earlier
from overweave.schedules.moves.signal_numbers import TOLD, Event, SignalNumbers

OWN, LANDED = "own", "landed"  # buffers: what tiles write, and what peers bring


def all_to_all_moves(sends: bool, by_library: bool, mesh: Mesh) -> AllToAll:
    """The moves of the templates: in step s every rank serves the peer at distance s, or the library carries all."""
    moves: tuple[chunks.Put | chunks.Collective, ...]
    if by_library:
        blocks = tuple(chunks.Chunk(shard_rows(mesh.rows, mesh.world_size, rank)) for rank in range(mesh.world_size))
        moves = (chunks.Collective(blocks),) if mesh.world_size > 1 and mesh.rows else ()
    else:
        served = (turn if sends else (turn[1], turn[0], turn[2]) for turn in mesh.turns())
        moves = tuple(
            chunks.Put(rank, peer, chunk, mesh.lane(rank, peer), mover=mesh.mover)
            for rank, peer, piece in served
            for chunk in mesh.piece(peer, piece)
        )
    return AllToAll(mesh.world_size, moves, sends, mesh.copy_programs)


def chunked_all_to_all(written: AllToAll, rows: int, cols: int) -> Communication:
    """The moves, with a `Chunk` where tiles read what has arrived, or write what is sent.

    Raises ScheduleError for moves that leave something out, bring it twice, or carry another block than their peer's.
    """
    made = _Exchange(written, rows, cols)
    ranks = range(written.world_size)
    of_rank = made.sent if written.sends else made.read
    steps = [step for rank in ranks for step in of_rank(rank)] if rows else []
    names = dict.fromkeys(step.queue for step in steps if not isinstance(step, Chunk) and step.queue != TILES)
    return Communication(
        world_size=written.world_size,
        buffers=used(made.buffers, steps),
        pads=tuple(SignalPad(pad, size) for pad, size in made.numbers.sizes()),
        queues=tuple(_queue(name) for name in names),
        given=tuple(given for rank in ranks for given in made.given(rank)),
        goal=tuple(goal for rank in ranks for goal in made.goal(rank)),
        steps=tuple(steps),
    )


def _queue(name: str) -> Queue:
    if name == PUSHES:
        return Queue(name, ISSUE)
    return Queue(name, COMPLETE, after=(TILES,) if name == MAIN else ())


class _Move(Struct, frozen=True):
    """box: as the sender has it. lands: its rows at the peer."""

    at: int
    put: chunks.Put
    box: Box
    lands: Range


class _Together(Struct, frozen=True):
    """What the library carries at once: of each block, the rows that every rank has of it."""

    at: int
    rows: tuple[Range, ...]


class _Exchange:
    """One list at one size. Whoever waits for a move is known before anything is made."""

    def __init__(self, written: AllToAll, rows: int, cols: int) -> None:
        self.size, self.rows, self.cols, self.sends = written.world_size, rows, cols, written.sends
        if rows % self.size:
            found = f"{rows} rows are no whole blocks for {self.size} ranks"
            raise InputError("exchange all to all", found, "Pad the rows to a multiple of the ranks")
        self.block, self.numbers = rows // self.size, SignalNumbers()
        listed = list(enumerate(written.moves))
        self.moves = [self._move(at, put) for at, put in listed if isinstance(put, chunks.Put)]
        self.together = [self._at_once(at, one) for at, one in listed if isinstance(one, chunks.Collective)]
        self.is_all_by_library = self.size > 1 and bool(self.together) and not self.moves
        self._check_cover()
        self.has_lanes = len({one.put.lane for one in self.moves if one.put.mover == ENGINE}) > 1
        self.written, self.places = written, written.places()
        self.holes = [self._holes(rank) for rank in range(self.size)]
        self.parts = [list(self._parts(rank)) for rank in range(self.size)]
        self.waits = {one.at: self._waits(one) for one in self.moves}
        ranks = range(self.size)
        self.begun = {
            (one.at, rank): self.numbers.waits(self._after(one.at, rank)) for one in self.together for rank in ranks
        }

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        if self.sends:
            own, landed = Buffer(OWN, self.rows, self.cols, "local"), Buffer(LANDED, self.rows, self.cols, "symmetric")
            return own, landed, Buffer(Y, self.rows, self.cols, "output")
        x = Buffer(X, self.rows, self.cols, "input")
        return x, Buffer(GATHERED, self.rows, self.cols, "local" if self.is_all_by_library else "symmetric")

    def given(self, rank: int) -> Iterator[Given]:
        for to in range(self.size) if not self.sends else ():
            rows = shifted((0, self.block), to * self.block)
            yield Given(Region(X, rank, rows, (0, self.cols)), received(A, to), rank * self.block, 0)

    def goal(self, rank: int) -> Iterator[Goal]:
        if self.sends and self.rows:
            yield Goal(Region(Y, rank, (0, self.rows), (0, self.cols)), received(A, rank), 0, 0)

    def read(self, rank: int) -> Iterator[Operation | Chunk]:
        """A rank's pushes of what the caller has, then the rows that its tiles read, as they arrive."""
        yield from self._moves(rank, X, GATHERED)
        x, gathered = self.buffers
        if not self.is_all_by_library:
            own = self._own(rank)
            yield Chunk(name=f"read.{rank}.own", rank=rank, rows=own, region=region(x, rank, own))
        for rows, waits in self.parts[rank]:
            part = region(gathered, rank, rows)
            yield Chunk(name=f"read.{rank}.{rows[0]}", rank=rank, rows=rows, region=part, waits=waits)

    def sent(self, rank: int) -> Iterator[Operation | Chunk]:
        """The rows that a rank's tiles write, in the order in which they are sent, the pushes, and what has arrived."""
        own = Buffer(Y if self.size == 1 else OWN, self.rows, self.cols, "local")
        for hole, rows in enumerate(self.holes[rank]):
            notifies = self.numbers.notifies(("tiles", rank, hole))
            part = region(own, rank, rows)
            yield Chunk(name=f"write.{rank}.{rows[0]}", rank=rank, rows=rows, region=part, notifies=notifies)
        if self.is_all_by_library:
            yield from self._moves(rank, OWN, Y)
            return
        kept = self._own(rank)
        yield Chunk(name=f"write.{rank}.own", rank=rank, rows=kept, region=region(own, rank, kept))
        yield from self._moves(rank, OWN, LANDED)
        if self.size > 1:
            rest = [rows for rows in ((0, kept[0]), (kept[1], self.rows)) if not is_empty(rows)]
            places = [(OWN, kept), *((LANDED, rows) for rows in rest)]
            yield Copy(
                name=f"collect.{rank}",
                rank=rank,
                queue=MAIN,
                waits=self.parts[rank][0][1],
                sources=tuple(Region(name, rank, rows, (0, self.cols)) for name, rows in places),
                destinations=tuple(Region(Y, rank, rows, (0, self.cols)) for _, rows in places),
            )

    def _move(self, at: int, put: chunks.Put) -> _Move:
        asked = f"move {at} of an all-to-all of [{self.rows}, {self.cols}] on {self.size} ranks"
        ranks = range(self.size)
        if put.rank not in ranks or put.peer not in ranks or put.rank == put.peer:
            raise ScheduleError(asked, f"it moves from rank {put.rank} to {put.peer}", "Name two ranks of the group")
        box = Box(put.chunk.rows, put.chunk.cols or (0, self.cols))
        of_peer = Box(self._own(put.peer), (0, self.cols))
        if box.common(of_peer) != box or not box.area:
            found = f"chunk {put.chunk} is empty, or not inside block {of_peer}, which is rank {put.peer}'s"
            raise ScheduleError(asked, found, "Push rows of the peer's block")
        if not 0 <= put.lane < chunks.MOST_LANES:
            raise ScheduleError(asked, f"lane {put.lane}", f"Use lanes 0 to {chunks.MOST_LANES - 1}")
        found = move_obstacle(put, box, Box((0, self.rows), (0, self.cols)), is_own=True)
        if found or (self.sends and put.mover == "bulk_tiles"):
            raise ScheduleError(f"{asked}: mover={put.mover}", found or REGISTERS, "Use mover=copy_engine")
        return _Move(at, put, box, shifted(box.rows, (put.rank - put.peer) * self.block))

    def _at_once(self, at: int, move: chunks.Collective) -> _Together:
        asked = f"move {at} of an all-to-all of [{self.rows}, {self.cols}] on {self.size} ranks"
        whole, cure = (0, self.cols), "Give one for each block, whole rows of it"
        if len(move.chunks) != self.size:
            raise ScheduleError(asked, f"it has {len(move.chunks)} chunks", cure)
        for rank, chunk in enumerate(move.chunks):
            (lo, hi), (low, high) = chunk.rows, self._own(rank)
            if not low <= lo <= hi <= high or (chunk.cols or whole) != whole:
                raise ScheduleError(asked, f"chunk {chunk} is not inside block [{low}:{high}], or a part of rows", cure)
        return _Together(at, tuple(chunk.rows for chunk in move.chunks))

    def _check_cover(self) -> None:
        for source in range(self.size):
            for target in (peer for peer in range(self.size) if peer != source):
                boxes = [one.box for one in self.moves if (one.put.rank, one.put.peer) == (source, target)]
                boxes += [Box(one.rows[target], (0, self.cols)) for one in self.together]
                twice = any(a.common(b).area for i, a in enumerate(boxes) for b in boxes[:i])
                area = sum(box.area for box in boxes)
                if twice or area != self.block * self.cols:
                    what = "some of it twice" if twice else f"{area} of {self.block * self.cols} elements"
                    found = f"rank {source} sends {what} of rank {target}'s block"
                    raise ScheduleError("exchange all to all", found, "Send every element once")

    def _own(self, rank: int) -> Range:
        return rank * self.block, (rank + 1) * self.block

    def _holes(self, rank: int) -> list[Range]:
        """What a rank's tiles write for peers, between all edges of its chunks, in the order of sending."""
        mine = [one.box.rows for one in self.moves if one.put.rank == rank and self.sends]
        mine += [rows for one in self.together for rows in self._sent_by(one, rank) if self.sends]
        found = list(pairwise(sorted({edge for rows in mine for edge in rows})))
        first = {pair: next((i for i, r in enumerate(mine) if r[0] <= pair[0] < r[1]), -1) for pair in found}
        return sorted((pair for pair in found if first[pair] >= 0), key=lambda pair: first[pair])

    def _parts(self, rank: int) -> Iterator[tuple[Range, tuple[Wait, ...]]]:
        """What arrives, with its waits: behind tiles, or where the library carries all, at once; else as it comes."""
        mine = [one for one in self.moves if one.put.peer == rank]
        if self.sends or self.is_all_by_library:
            yield (0, self.rows), self.numbers.waits(self._arrivals(mine, are_ordered=True))
            return
        self.numbers.waits(self._arrivals(sorted(mine, key=lambda one: (one.lands, one.box.cols)), are_ordered=False))
        landed = [rows for one in self.together for rows in self._landing(one, rank) if not is_empty(rows)]
        found: list[tuple[int, Range, tuple[Wait, ...]]] = [(-1, rows, ()) for rows in landed]
        for rows in pairwise(sorted({edge for one in mine for edge in one.lands})):
            met = [one for one in mine if not is_empty(common(one.lands, rows))]
            if met:
                waits = self.numbers.waits(self._arrivals(met, are_ordered=False))
                found.append((max(one.at for one in met), rows, waits))
        yield from ((rows, waits) for _, rows, waits in sorted(found, key=lambda one: one[:2]))

    def _arrivals(self, moves: Iterable[_Move], are_ordered: bool) -> list[Event]:
        """are_ordered: without those that a later one of the same copy queue implies."""
        last = {(one.put.rank, one.put.lane if self._is_ordered(one) else f"{one.at}"): one for one in moves}
        kept = list(last.values()) if are_ordered else list(moves)
        return [self._event(one, one.put.peer) for one in kept]

    def _is_ordered(self, one: _Move) -> bool:
        return one.put.mover == ENGINE

    def _event(self, one: _Move, rank: int) -> Event:
        pad = ARRIVED if rank == one.put.peer else TOLD
        return Event(pad, rank, ("move", one.at, rank), not self._is_ordered(one))

    def _waits(self, move: _Move) -> tuple[Wait, ...]:
        events: list[Event] = []
        for hole, rows in enumerate(self.holes[move.put.rank]):
            if not is_empty(common(rows, move.box.rows)):
                events.append(Event(COMPUTED, move.put.rank, ("tiles", move.put.rank, hole)))
        return self.numbers.waits([*events, *self._after(move.at, move.put.rank)])

    def _after(self, at: int, rank: int) -> Iterator[Event]:
        """What a rank is to hear before its part of a move, but for what the order of its own queue implies."""
        move = self.written.moves[at]
        lane = move.lane if isinstance(move, chunks.Put) else MAIN
        carried = {one.at: one for one in self.moves}
        for named in move.after:
            place = earlier(self.places, at, named)
            one = carried.get(place)
            if one is None and lane != MAIN:
                yield Event(TOLD, rank, ("move", place, rank))
            elif one is not None and ((one.put.rank, one.put.lane) != (rank, lane) or not self._is_ordered(one)):
                yield self._event(one, rank)

    def _moves(self, rank: int, source: str, target: str) -> Iterator[Operation]:
        """What a rank pushes, and its part of what the library carries, in the order of the list."""
        puts = {one.at: one for one in self.moves if one.put.rank == rank}
        together = {one.at: one for one in self.together}
        for at in sorted({*puts, *together}):
            is_put = at in puts
            yield (
                self._put(puts[at], source, target) if is_put else self._collective(together[at], rank, source, target)
            )

    def _sent_by(self, one: _Together, rank: int) -> list[Range]:
        """The rows that a rank gives the library for each: something for itself only where the library carries all."""
        whole = self.is_all_by_library
        return [rows if to != rank or whole else (rows[0], rows[0]) for to, rows in enumerate(one.rows)]

    def _landing(self, one: _Together, rank: int) -> list[Range]:
        """Where what the library brings from each lands."""
        lo, hi = one.rows[rank]
        ends = ((lo, hi if by != rank or self.is_all_by_library else lo) for by in range(self.size))
        return [shifted(rows, (by - rank) * self.block) for by, rows in enumerate(ends)]

    def _collective(self, one: _Together, rank: int, source: str, target: str) -> LibraryCollective:
        return LibraryCollective(
            name=f"all_to_all.{rank}.{one.at}",
            rank=rank,
            queue=MAIN,
            waits=self.begun[one.at, rank],
            notifies=self.numbers.notifies(("move", one.at, rank)),
            function="all_to_all",
            label=f"all_to_all.{one.at}",
            ranks=tuple(range(self.size)),
            sources=tuple(Region(source, rank, rows, (0, self.cols)) for rows in self._sent_by(one, rank)),
            destinations=tuple(Region(target, rank, rows, (0, self.cols)) for rows in self._landing(one, rank)),
        )

    def _put(self, one: _Move, source: str, target: str) -> Put:
        rank = one.put.rank
        of_ranks = (self.numbers.notifies(("move", one.at, peer)) for peer in range(self.size))
        told = tuple(notify for notifies in of_ranks for notify in notifies)
        check_told(one.at, one.put, told)
        return Put(
            name=f"push.{rank}-{one.put.peer}.{one.at}",
            rank=rank,
            queue=queue_of(one.put, self.has_lanes),
            waits=self.waits[one.at],
            notifies=told,
            sources=(Region(source, rank, one.box.rows, one.box.cols),),
            destinations=(Region(target, one.put.peer, one.lands, one.box.cols),),
        )
