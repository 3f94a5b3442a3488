"""The program `ring`: shards of keys and values go round in the memory of two of them; also on two levels.

A rank has a piece of each shard that comes by, and passes it on while it computes. What has come lies in one of two
places by turns: once a piece is computed and the shard has gone on, its place is retired, and who sends what comes
there next is told. Backwards a sum of gradients follows each shard a stop behind, and arrives while the next piece is
computed; every rank adds its part, in fp32, and the last who sees the shard sends it home. Who goes where: `routes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from overweave.attention.pieces import wide
from overweave.attention.programs import (
    TRAVEL,
    BufferRows,
    OnPaper,
    RowsPlace,
    Work,
    nothing,
    on_paper,
)
from overweave.attention.routes import LEVELS, SLOTS, ShardRoute, Stop, Turn, routes
from overweave.attention.sequence import Sequence
from overweave.ir.schedule import Schedule
from overweave.lang.mapping import TileChannel, Tiles
from overweave.ops.author.tile_program import TileCall
from overweave.runtime.handwritten import Access, Declared, Part, SymmetricBuffer
from overweave.schedules.records.attention import DOUBLE_RING, RING

SUMS = "sums"
MADE, HOME = "made", "home"  # sums that a rank sends, by turns; those that come home


class RingTravel(NamedTuple):
    """The programs `ring`, and of several islands `double_ring`: as of `Travel`."""

    sequence: Sequence
    columns: int
    dtype: torch.dtype
    is_backward: bool = False
    islands: int = 1

    def with_elements(self, columns: int, dtype: torch.dtype) -> RingTravel:
        """The same of other rows of keys."""
        return self._replace(columns=columns, dtype=dtype)

    def declared(self) -> Declared:
        """What peers address: no more than two shards on a level, and of sums, which ranks make, too."""
        ranks = self.sequence.ranks
        names = dict.fromkeys(self._places(of_sums=False), self.dtype)
        levels = LEVELS if self.islands > 1 else LEVELS[:1]
        channels = [f"{what}_{level}" for what in ("arrived", "free") for level in levels] + ["computed", "gone"]
        if self.is_backward:
            names |= dict.fromkeys(self._places(of_sums=True), wide(self.dtype))
            channels += [f"{what}_{SUMS}_{level}" for what in ("arrived", "free") for level in levels]
            channels += ["made", "sent", HOME]
        rows = max(1, self.sequence.own(0))
        buffers = {name: SymmetricBuffer(rows, self.columns, dtype) for name, dtype in names.items()}
        return Declared(buffers, dict.fromkeys(channels, TileChannel(Tiles(ranks, 1, 1, 1, ranks))))

    def _places(self, of_sums: bool) -> Iterator[str]:
        """As many as any rank has of each kind."""
        of_ranks = routes(self.sequence, self.islands)
        for name in TRAVEL:
            for level in LEVELS:
                most = max(len(route.arrivals(level, of_sums)) for route in of_ranks)
                for slot in range(min(most, SLOTS)):
                    yield _place(name, level, slot, of_sums)
            if of_sums:
                yield from (_made(name, slot) for slot in range(SLOTS))
                yield f"{name}_{HOME}"

    def route(self, rank: int) -> ShardRoute:
        """The stops of a rank."""
        return routes(self.sequence, self.islands)[rank]

    def held(self, rank: int, source: int) -> tuple[BufferRows, ...]:
        """Where a peer's shard lies with a rank."""
        stop, rows = self._stop(rank, source), slice(0, self.sequence.own(source))
        return () if stop is None or stop.came is None else tuple((slot_name(name, stop.came), rows) for name in TRAVEL)

    def parts(self, rank: int, source: int) -> tuple[BufferRows, ...]:
        """Where a rank makes the sum of a shard's gradients up to its own part."""
        stop, rows = self._stop(rank, source), slice(0, self.sequence.own(source))
        if stop is None or not stop.is_seen:
            return ()
        made = self._made_before(rank, stop) % SLOTS
        return tuple((f"{name}_{HOME}" if stop.sum_goes is None else _made(name, made), rows) for name in TRAVEL)

    def added(self, rank: int, source: int) -> tuple[BufferRows, ...]:
        """Where the sum of the parts of ranks before it lies, which a rank adds to its own."""
        stop, rows = self._stop(rank, source), slice(0, self.sequence.own(source))
        came = None if stop is None else stop.sum_came
        return () if came is None else tuple((slot_name(name, came, True), rows) for name in TRAVEL)

    def landed(self, rank: int) -> tuple[tuple[slice, tuple[BufferRows, ...]], ...]:
        """What a rank's gradients are the sum of: rows of its own, and where a part of them lies."""
        own = slice(0, self.sequence.own(rank))
        return ((own, tuple((f"{name}_{HOME}", own) for name in TRAVEL)),) if own.stop else ()

    def _stop(self, rank: int, source: int) -> Stop | None:
        return next((stop for stop in self.route(rank).stops if stop.source == source), None)

    def _made_before(self, rank: int, stop: Stop) -> int:
        """How many sums a rank has made, and sent, before a stop."""
        return sum(each.sum_goes is not None for each in self.route(rank).stops if each.step < stop.step)

    def schedule(self) -> Schedule | None:
        """What is proven before it runs; None where nothing moves."""
        return on_paper(self, RING if self.islands == 1 else DOUBLE_RING) if self.sequence.rows else None

    def write(
        self, call: TileCall, given: tuple[RowsPlace, RowsPlace], work: Work, paper: OnPaper | None = None
    ) -> None:
        """A call. given: the own keys and values, `[rows, columns]`."""
        written = _Written(call, self, given, paper)
        for stop in self.route(call.rank).stops:
            written.pass_on(stop)
            written.compute(stop, work)
            written.end(stop)
        written.finish(work)


def slot_name(name: str, turn: Turn, of_sums: bool = False) -> str:
    """The buffer where what arrives lies."""
    return _place(name, turn.level, turn.slot, of_sums)


def _place(name: str, level: str, slot: int, of_sums: bool) -> str:
    return f"{name}_{SUMS}_{level}_{slot}" if of_sums else f"{name}_{level}_{slot}"


def _made(name: str, slot: int) -> str:
    return f"{name}_{MADE}_{slot}"


class _Written:
    """A call of one rank as it is written down. made: how many sums the rank has made to send."""

    def __init__(
        self, call: TileCall, travel: RingTravel, given: tuple[RowsPlace, RowsPlace], paper: OnPaper | None
    ) -> None:
        self.call, self.travel, self.given, self.paper = call, travel, given, paper
        self.route, self.made = travel.route(call.rank), 0
        self.sends = sum(stop.sum_goes is not None for stop in self.route.stops) if travel.is_backward else 0

    def pass_on(self, stop: Stop) -> None:
        """A shard goes on as soon as it is there, and its place at the next rank is free."""
        for rank, turn in stop.passed:
            assert turn is not None
            queue = self.call.queue(turn.level)
            if stop.came is not None:
                queue.rank_wait(f"arrived_{stop.came.level}", stop.came.number)
            if turn.number >= SLOTS:
                queue.rank_wait(f"free_{turn.level}", stop.step)
            for name, place in zip(TRAVEL, self._shard(stop), strict=True):
                target = self.call.part(slot_name(name, turn), rank)
                queue.rank_copy_data(place, target[slice(0, self.travel.sequence.own(stop.source))])
            queue.rank_notify(f"arrived_{turn.level}", turn.number, rank)

    def compute(self, stop: Stop, work: Work) -> None:
        """The piece, and the sum that it makes of the one that came."""
        if not stop.is_seen:
            return
        call, is_sum = self.call, self.travel.is_backward
        if stop.came is not None:
            call.rank_wait(f"arrived_{stop.came.level}", stop.came.number)
        reads, makes = self._of_piece(stop) if self.paper else ((), ())
        call.rank_compute(f"piece_{stop.source}", partial(work.piece, stop.source), reads, makes)
        if is_sum:
            self._add(stop, work)
            self._free_sum(stop)
            self._send_sum(stop)

    def end(self, stop: Stop) -> None:
        """The place of a shard is free again, if another comes there: it is computed, and has gone on."""
        came, call = stop.came, self.call
        following = None if came is None else self.route.next_there(came)
        if came is None or following is None:
            return
        queue = call.queue(came.level)
        queue.rank_wait(f"arrived_{came.level}", came.number)
        for _, turn in stop.passed:
            if turn is not None and turn.level != came.level:
                call.queue(turn.level).rank_notify("gone", stop.step, call.rank)
                queue.rank_wait("gone", stop.step)
        if stop.is_seen:
            call.rank_notify("computed", stop.step, call.rank)
            queue.rank_wait("computed", stop.step)
        for name in TRAVEL:
            queue.rank_retire(call.part(slot_name(name, came))[self._rows(stop)])
        queue.rank_notify(f"free_{came.level}", following.step, following.giver)

    def finish(self, work: Work) -> None:
        """What all pieces come to, and the sums that have come home."""
        call, paper = self.call, self.paper
        begin, end = self.travel.sequence.stored(call.rank)
        if self.travel.is_backward and self.route.home is not None:
            call.rank_wait(HOME, call.rank)
        reads, makes = list[Access](), tuple[Access, ...]()
        if paper is not None:
            self._unseen(paper.seen)
            reads, makes = (
                [Access(paper.seen, "seen")],
                tuple(Access(each, each.buffer, begin) for each in paper.results),
            )
        if paper is not None and self.travel.is_backward and begin < end:
            own, last = slice(0, end - begin), self.route.home or 0
            reads += [Access(call.part(f"{name}_{HOME}")[own], f"{name}.{last}", begin) for name in TRAVEL]
        call.rank_compute("finish", work.finish, tuple(reads), makes)

    def _unseen(self, seen: Part) -> None:
        """On paper the results of shards of which the rank sees nothing."""
        known = {stop.source for stop in self.route.stops if stop.is_seen}
        for source in range(self.travel.sequence.ranks):
            if source not in known:
                self.call.rank_compute("nothing", nothing, (), (Access(seen[source : source + 1], "seen", source),))

    def _rows(self, stop: Stop) -> slice:
        """Of the shard, in the place where it came."""
        return slice(0, self.travel.sequence.own(stop.source))

    def _shard(self, stop: Stop) -> tuple[RowsPlace, ...]:
        """Its keys and values: where the caller has them, or where they came."""
        came = stop.came
        if came is None:
            return self.given
        return tuple(self.call.part(slot_name(name, came))[self._rows(stop)] for name in TRAVEL)

    def _of_piece(self, stop: Stop) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        """What a piece reads and makes on paper."""
        sequence, paper, source = self.travel.sequence, self.paper, stop.source
        piece, begin = sequence.piece(self.call.rank, source), sequence.stored(source)[0]
        assert paper is not None
        assert piece is not None
        places = zip(TRAVEL, self._shard(stop), strict=True)
        reads = [Access(each[piece.keys], name, begin + piece.keys.start) for name, each in places]  # type: ignore[arg-type]
        return tuple(reads), (Access(paper.seen[source : source + 1], "seen", source),)

    def _add(self, stop: Stop, work: Work) -> None:
        """The sum of this rank's part and of the sum that has come while the piece was computed."""
        call, source = self.call, stop.source
        if stop.sum_came is not None:
            call.rank_wait(f"arrived_{SUMS}_{stop.sum_came.level}", stop.sum_came.number)
        if stop.sum_goes is not None and self.made >= SLOTS:
            call.rank_wait("sent", self.made - SLOTS)
        reads, makes = list[Access](), tuple[Access, ...]()
        if self.paper is not None:
            begin = self.travel.sequence.stored(source)[0]
            reads = [Access(self.paper.seen[source : source + 1], "seen", source)]
            if came := stop.sum_came:
                added = zip(TRAVEL, self.travel.added(call.rank, source), strict=True)
                reads += [Access(call.part(each)[rows], f"{name}.{came.step}", begin) for name, (each, rows) in added]
            made = zip(TRAVEL, self.travel.parts(call.rank, source), strict=True)
            makes = tuple(Access(call.part(each)[rows], f"{name}.{stop.step}", begin) for name, (each, rows) in made)
        call.rank_compute(f"add_{source}", partial(work.add, source), tuple(reads), makes)

    def _free_sum(self, stop: Stop) -> None:
        """The place where a sum came is free again, if another comes there: this rank's part was added to it."""
        came, call = stop.sum_came, self.call
        following = None if came is None else self.route.next_there(came, of_sums=True)
        if came is None or following is None:
            return
        for name in TRAVEL:
            call.rank_retire(call.part(slot_name(name, came, True))[self._rows(stop)])
        call.rank_notify(f"free_{SUMS}_{came.level}", following.step, following.giver)

    def _send_sum(self, stop: Stop) -> None:
        """A sum goes to who sees the shard next, or home."""
        if stop.sum_goes is None:
            return
        call, queue, rows, (peer, turn) = self.call, self.call.queue(SUMS), self._rows(stop), stop.sum_goes
        call.rank_notify("made", self.made, call.rank)
        queue.rank_wait("made", self.made)
        if turn is not None and turn.number >= SLOTS:
            queue.rank_wait(f"free_{SUMS}_{turn.level}", stop.step)
        for name in TRAVEL:
            target = f"{name}_{HOME}" if turn is None else slot_name(name, turn, True)
            queue.rank_copy_data(call.part(_made(name, self.made % SLOTS))[rows], call.part(target, peer)[rows])
        told, number = (HOME, peer) if turn is None else (f"arrived_{SUMS}_{turn.level}", turn.number)
        queue.rank_notify(told, number, peer)
        self._end_sum(rows)

    def _end_sum(self, rows: slice) -> None:
        """The place of a sum that was sent is free again, if another is made there."""
        if self.made + SLOTS < self.sends:
            queue = self.call.queue(SUMS)
            for name in TRAVEL:
                queue.rank_retire(self.call.part(_made(name, self.made % SLOTS))[rows])
            queue.rank_notify("sent", self.made, self.call.rank)
        self.made += 1
