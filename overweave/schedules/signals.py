"""Signals that follow from what steps read and write: whoever reads a region waits for the steps that write it.

Every region is written once in a call, or added to. A wait is left out where the order of queues implies it: what a
stream or a copy engine completes in order is known to be done when a later step of it is. What a kernel writes and
peers read where it lies is told to them by a stream, which waits for the kernel. Tiles that store at a peer announce it
there themselves: the tiles that one step waits for add to one signal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.schedule import Copy, Get, Notify, Operation, Put, Queue, Range, ReducePut, Region, SignalPad, Wait
from overweave.ir.verify.rules.races import overlap
from overweave.schedules.communication import (
    ARRIVED,
    COMPLETE,
    COMPUTED,
    COPIES,
    MAIN,
    SUMMED,
    TILES,
    TOLD,
    Communication,
    MatmulChunk,
)

PADS = (COMPUTED, SUMMED, ARRIVED, TOLD)
RELAYS = f"{COPIES}.told"  # the queue that tells peers what they may read: it must not stand behind own copies

CommunicationStep = Operation | MatmulChunk


class Announcement(NamedTuple):
    """What one signal on `rank` announces: that the steps at these places of the list are done.

    in_parts: a kernel announces it tile by tile, so that the signal counts higher than one.
    """

    pad: str
    rank: int
    by: tuple[int, ...]
    in_parts: bool


def with_signals(made: Communication) -> Communication:
    """The same with waits, notifies and pads; or, where steps notify already, as packed messages do, with its pads.

    Raises ScheduleError where other ranks than its peer wait for what a kernel carries.
    """
    sizes: dict[str, int] = {}
    for notify in (notify for step in made.steps for notify in step.notifies):
        sizes[notify.pad] = max(sizes.get(notify.pad, 0), notify.signal + 1)
    pads = tuple(SignalPad(pad, size) for pad, size in sizes.items())
    return replace(made, pads=pads) if pads else _Signals(made).communication()


class _Signals:
    def __init__(self, made: Communication) -> None:
        self.made, self.listed = made, made.steps
        self.after = {queue.name: queue.after for queue in made.queues}
        self.after.setdefault(TILES, (MAIN,))
        self.complete = {queue.name for queue in made.queues if queue.order == COMPLETE} - {TILES}
        self.queues = [TILES if isinstance(step, MatmulChunk) else step.queue for step in self.listed]
        self.writers = _Writers(self.listed, made.tiles_read)
        self.written = {at: list(dict.fromkeys(self._written_for(at))) for at in range(len(self.listed))}
        self.together = self._told_together()
        self.numbers: dict[Announcement, int] = {}
        self.counts: dict[tuple[str, int], int] = {}  # signals in use, of a pad and rank
        self.heard: set[Announcement] = set()
        self.told: dict[int, list[Announcement]] = {}  # by the steps at these places
        self.tells: dict[int, list[Announcement]] = {}  # by a stream that waits for the steps at these places

    def communication(self) -> Communication:
        waits = {at: self._ranges(self._events(at)) for at in self._in_order_of_readers()}
        steps = list(self._steps(waits))
        told = (Queue(RELAYS, COMPLETE),) if self.tells else ()
        sizes = {pad: max((n for (name, _), n in self.counts.items() if name == pad), default=0) for pad in PADS}
        return replace(
            self.made,
            steps=tuple(steps),
            queues=(*self.made.queues, *told),
            pads=tuple(SignalPad(pad, size) for pad, size in sizes.items() if size),
        )

    def _in_order_of_readers(self) -> list[int]:
        """The places of all steps, in the order in which what they wait for is numbered: neighbours make one range.

        Kernels come first, whose tables can tell little more than one range: tiles, those that read by their rows, so
        that one that reads several parts waits for one range, too; then sums in launch order.
        """

        def turn(at: int) -> tuple[int, Range]:
            step = self.listed[at]
            if isinstance(step, MatmulChunk):
                return 0, step.rows if self.made.tiles_read else (0, 0)
            return (2 if step.queue in self.complete else 1), (0, 0)

        return sorted(range(len(self.listed)), key=turn)

    def _steps(self, waits: dict[int, tuple[Wait, ...]]) -> Iterator[CommunicationStep]:
        tellers = {at: self._teller(at) for at in self.tells}
        late = "waits" if self.made.tiles_read else "late_waits"
        for at, step in enumerate(self.listed):
            field = late if isinstance(step, MatmulChunk) else "waits"
            notifies = self._notifies(self.told.get(at, ()))
            if isinstance(step, Put) and self._tells_more_than_its_peer(step, notifies):
                found = f"ranks {sorted({one.rank for one in notifies})} wait for it, and kernels tell the peer alone"
                raise ScheduleError(f"carry {step.name} by a kernel", found, "Use mover=copy_engine")
            yield replace(step, **{field: waits[at]}, notifies=notifies)
            if at in tellers:
                yield tellers[at]

    def _tells_more_than_its_peer(self, step: Put, notifies: Iterable[Notify]) -> bool:
        """Of what a kernel carries."""
        return step.queue not in self.complete and any(one.rank != step.peer for one in notifies)

    def _ranges(self, events: Iterable[Announcement]) -> tuple[Wait, ...]:
        """Waits for all of the events. Consecutive signals of a pad whose counts are alike become one range."""
        numbered = {(PADS.index(event.pad), self._number(event), event.in_parts) for event in events}
        waits: list[Wait] = []
        before: tuple[int, int, bool] | None = None
        for pad, signal, in_parts in sorted(numbered):
            if before == (pad, signal - 1, in_parts):
                waits[-1] = Wait(PADS[pad], (waits[-1].signals[0], signal + 1), 1)
            else:
                waits.append(Wait(PADS[pad], (signal, signal + 1), 1))
            before = (pad, signal, in_parts)
        return tuple(waits)

    def _written_for(self, at: int) -> Iterator[int]:
        """The steps that write what a step reads, in that order, and are not known to be done when it begins."""
        step = self.listed[at]
        for part in (*_reads(step, self.made.tiles_read), *self.made.behind.get(step.name, ())):
            for writer in self.writers.of(part):
                if writer != at and not self._is_implied(writer, at) and not _add_alike(step, self.listed[writer]):
                    yield writer

    def _told_together(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """For each chunk that tiles store at a peer, and that peer, all those which the same steps wait for there."""
        readers: dict[tuple[int, int], list[int]] = {}
        for at, written in self.written.items():
            rank = self.listed[at].rank
            for writer in written:
                if self._is_stored(writer, rank):
                    readers.setdefault((writer, rank), []).append(at)
        alike: dict[tuple[int, ...], list[int]] = {}
        for (writer, _), of_writer in readers.items():
            alike.setdefault(tuple(of_writer), []).append(writer)
        return {place: tuple(alike[tuple(of_writer)]) for place, of_writer in readers.items()}

    def _is_stored(self, writer: int, rank: int) -> bool:
        """Whether tiles of another rank store it on this one."""
        by = self.listed[writer]
        return isinstance(by, MatmulChunk) and by.rank != rank and any(part.rank == rank for part in _writes(by, False))

    def _events(self, at: int) -> list[Announcement]:
        """What a step waits for; of what a queue completes in order, the last."""
        rank, written = self.listed[at].rank, self.written[at]
        last: dict[tuple[int, str], int] = {}
        for writer in (one for one in written if self.queues[one] in self.complete):
            queue = self.listed[writer].rank, self.queues[writer]
            last[queue] = max(last.get(queue, writer), writer)
        kept = set(last.values())
        needed = (one for one in written if self.queues[one] not in self.complete or one in kept)
        return [self._event(writer, rank) for writer in needed]

    def _event(self, writer: int, rank: int) -> Announcement:
        """That a step is done, for a rank to wait for."""
        by, by_one = self.listed[writer], (writer,)
        if (together := self.together.get((writer, rank))) is not None:
            return Announcement(ARRIVED, rank, together, True)
        if isinstance(by, MatmulChunk):
            return (
                Announcement(COMPUTED, rank, by_one, True)
                if by.rank == rank
                else Announcement(TOLD, rank, by_one, False)
            )
        in_parts = by.instances > 1
        if isinstance(by, Put | Get) and any(part.rank == rank for part in by.writes):
            return Announcement(ARRIVED, rank, by_one, in_parts)
        if by.rank == rank:
            return Announcement(SUMMED, rank, by_one, in_parts)
        return Announcement(TOLD, rank, by_one, in_parts and not self._needs_teller(writer))

    def _needs_teller(self, writer: int) -> bool:
        """Whether it is done by a kernel that tells its own rank alone."""
        return self.queues[writer] not in self.complete and not isinstance(self.listed[writer], Put)

    def _number(self, event: Announcement) -> int:
        """The signal of an event. One that no reader has waited for before gets a new number, and is announced."""
        if event not in self.numbers:
            alike = [event._replace(rank=rank) for rank in self._alike(event)]
            number = max(self.counts.get((event.pad, one.rank), 0) for one in alike)
            for one in alike:
                self.numbers[one] = number
                self.counts[one.pad, one.rank] = number + 1
        if event not in self.heard:
            self.heard.add(event)
            announced = self.tells if event.pad == TOLD and self._needs_teller(event.by[0]) else self.told
            for writer in event.by:
                announced.setdefault(writer, []).append(event)
        return self.numbers[event]

    def _alike(self, event: Announcement) -> set[int]:
        """The ranks on which it has the same number: all at which one tile stores, as a tile announces one signal."""
        step = self.listed[event.by[0]]
        if isinstance(step, MatmulChunk) and event.pad == ARRIVED and len(event.by) == 1:
            return {part.rank for part in step.places or (step.region,) if part.rank != step.rank}
        return {event.rank}

    def _teller(self, at: int) -> Copy:
        """Tells peers that what a kernel has written may be read."""
        step, pad = self.listed[at], COMPUTED if isinstance(self.listed[at], MatmulChunk) else SUMMED
        done = Announcement(pad, step.rank, (at,), isinstance(step, MatmulChunk) or step.instances > 1)
        return Copy(
            name=f"tell.{step.name}",
            rank=step.rank,
            queue=RELAYS,
            waits=self._ranges([done]),
            notifies=self._notifies(self.tells[at]),
            sources=(),
            destinations=(),
        )

    def _notifies(self, events: Iterable[Announcement]) -> tuple[Notify, ...]:
        return tuple(Notify(event.pad, event.rank, self.numbers[event]) for event in events)

    def _is_implied(self, writer: int, reader: int) -> bool:
        """Whether the order of queues says that one step is done before another starts."""
        if self.listed[writer].rank != self.listed[reader].rank or writer > reader:
            return False
        before, queue = self.queues[writer], self.queues[reader]
        return (before == queue and queue in self.complete) or before in self.after.get(queue, ())


class _Writers:
    """The steps that write a region, by its buffer and rank."""

    def __init__(self, steps: tuple[CommunicationStep, ...], tiles_read: bool) -> None:
        written: dict[tuple[str, int], list[tuple[tuple[int, int], int, Region]]] = {}
        for at, step in enumerate(steps):
            for part in _writes(step, tiles_read):
                written.setdefault((part.buffer, part.rank), []).append(((part.rows[0], part.cols[0]), at, part))
        self.written = {place: sorted(parts, key=lambda one: one[:2]) for place, parts in written.items()}
        # Of the parts up to each one, where the last ends.
        ends = {place: (part.rows[1] for _, _, part in parts) for place, parts in self.written.items()}
        self.ends = {place: list(accumulate(rows, max)) for place, rows in ends.items()}

    def of(self, read: Region) -> Iterator[int]:
        """By the rows that they write."""
        place = read.buffer, read.rank
        parts, (lo, hi) = self.written.get(place, []), read.rows
        for at in range(bisect_right(self.ends[place], lo) if parts else 0, len(parts)):
            (first, _), step, part = parts[at]
            if first >= hi:
                return
            if overlap(part, read):
                yield step


def _reads(step: CommunicationStep, tiles_read: bool) -> tuple[Region, ...]:
    return step.addends if isinstance(step, MatmulChunk) and not tiles_read else step.reads


def _writes(step: CommunicationStep, tiles_read: bool) -> tuple[Region, ...]:
    if isinstance(step, MatmulChunk):
        return step.into if tiles_read else step.places or (step.region,)
    return step.writes


def _add_alike(one: CommunicationStep, other: CommunicationStep) -> bool:
    """Whether both add to what lies there: neither waits for the other."""
    return isinstance(one, ReducePut) and isinstance(other, ReducePut)
