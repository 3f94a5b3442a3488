"""Derive the waits and notifies of a communication: a step that reads a region waits for the steps that write it.

Every region is written once in a call, or added to. A wait is left out where the order of queues implies it: a stream
or a copy engine completes its steps in order. A kernel signals on its own rank alone. Where peers read what it wrote,
a relay notifies them: a step without data on a side stream, which waits for the kernel. Tiles that store at a peer
notify that peer themselves: all the tiles that one step waits for add to one signal.
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
RELAYS = f"{COPIES}.told"  # queue of the relays: a relay must not wait behind the copies of its rank

CommunicationStep = Operation | MatmulChunk


class Announcement(NamedTuple):
    """What one signal on `rank` says: the steps `by` (indices of the list of steps) are done.

    in_parts: a kernel notifies tile by tile, so that the signal counts higher than one.
    """

    pad: str
    rank: int
    by: tuple[int, ...]
    in_parts: bool


def with_signals(communication: Communication) -> Communication:
    """Return the communication with waits, notifies and pads; with pads alone if its steps notify already (packed).

    Raises ScheduleError if a kernel pushes what ranks other than its peer wait for.
    """
    sizes: dict[str, int] = {}
    for notify in (notify for step in communication.steps for notify in step.notifies):
        sizes[notify.pad] = max(sizes.get(notify.pad, 0), notify.signal + 1)
    pads = tuple(SignalPad(pad, size) for pad, size in sizes.items())
    return replace(communication, pads=pads) if pads else _Signals(communication).derived()


class _Signals:
    """Assigns a signal to every event that a step waits for, and a notify to the steps that cause it.

    steps: in launch order; a step is known by its index. queues: index -> the queue that runs it.
    predecessors: queue -> the queues whose earlier steps are done when it starts. in_order: queues that complete each
    step before the next. awaited: index -> the steps that write what it reads, and that may still run when it starts.
    stores: (chunk, peer) -> all chunks that the same steps wait for at that peer.
    numbers: event -> its signal. used: (pad, rank) -> how many signals of the pad are in use.
    notified: events that a step or a relay notifies already. by_step, by_relay: index -> the events that the step
    itself notifies, or a relay behind it.
    """

    def __init__(self, communication: Communication) -> None:
        self.communication, self.steps = communication, communication.steps
        self.predecessors = {queue.name: queue.after for queue in communication.queues}
        self.predecessors.setdefault(TILES, (MAIN,))
        self.in_order = {queue.name for queue in communication.queues if queue.order == COMPLETE} - {TILES}
        self.queues = [TILES if isinstance(step, MatmulChunk) else step.queue for step in self.steps]
        self.writers = _Writers(self.steps, communication.tiles_read)
        self.awaited = {index: list(dict.fromkeys(self._awaited_by(index))) for index in range(len(self.steps))}
        self.stores = self._stores_by_readers()
        self.numbers: dict[Announcement, int] = {}
        self.used: dict[tuple[str, int], int] = {}
        self.notified: set[Announcement] = set()
        self.by_step: dict[int, list[Announcement]] = {}
        self.by_relay: dict[int, list[Announcement]] = {}

    def derived(self) -> Communication:
        waits = {index: self._waits(self._events(index)) for index in self._numbering_order()}
        steps = tuple(self._with_signals(waits))
        relays = (Queue(RELAYS, COMPLETE),) if self.by_relay else ()
        sizes = {pad: max((n for (name, _), n in self.used.items() if name == pad), default=0) for pad in PADS}
        return replace(
            self.communication,
            steps=steps,
            queues=(*self.communication.queues, *relays),
            pads=tuple(SignalPad(pad, size) for pad, size in sizes.items() if size),
        )

    def _numbering_order(self) -> list[int]:
        """Return all steps in the order in which their events get signals: events in a row make one range to wait for.

        Kernels come first, since a row of a tile table holds little more than one range: tiles, sorted by the rows that
        they read, so that a tile that reads several parts waits for one range as well; then sums, in launch order.
        """

        def rank_of(index: int) -> tuple[int, Range]:
            step = self.steps[index]
            if isinstance(step, MatmulChunk):
                return 0, step.rows if self.communication.tiles_read else (0, 0)
            return (2 if step.queue in self.in_order else 1), (0, 0)

        return sorted(range(len(self.steps)), key=rank_of)

    def _with_signals(self, waits: dict[int, tuple[Wait, ...]]) -> Iterator[CommunicationStep]:
        """Yield all steps with waits and notifies, each followed by its relay if it needs one."""
        relays = {index: self._relay(index) for index in self.by_relay}
        of_chunk = "waits" if self.communication.tiles_read else "late_waits"
        for index, step in enumerate(self.steps):
            field = of_chunk if isinstance(step, MatmulChunk) else "waits"
            notifies = self._notifies(self.by_step.get(index, ()))
            if isinstance(step, Put) and self._notifies_beyond_peer(step, notifies):
                found = f"ranks {sorted({one.rank for one in notifies})} wait for it, and kernels tell the peer alone"
                raise ScheduleError(f"carry {step.name} by a kernel", found, "Use mover=copy_engine")
            yield replace(step, **{field: waits[index]}, notifies=notifies)
            if index in relays:
                yield relays[index]

    def _notifies_beyond_peer(self, step: Put, notifies: Iterable[Notify]) -> bool:
        """Return whether a kernel pushes it and would have to notify a rank other than its peer."""
        return step.queue not in self.in_order and any(one.rank != step.peer for one in notifies)

    def _waits(self, events: Iterable[Announcement]) -> tuple[Wait, ...]:
        """Return the waits for all of the events. Consecutive signals of a pad become one range if both or neither of
        them count tile by tile."""
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

    def _awaited_by(self, reader: int) -> Iterator[int]:
        """Yield the steps that write what `reader` reads, in the order of its regions, unless the order of queues says
        that they are done when it starts."""
        step = self.steps[reader]
        for part in (*_reads(step, self.communication.tiles_read), *self.communication.behind.get(step.name, ())):
            for writer in self.writers.of(part):
                is_other = writer != reader and not _both_add(step, self.steps[writer])
                if is_other and not self._is_implied(writer, reader):
                    yield writer

    def _stores_by_readers(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """For each chunk that tiles store at a peer, and that peer: all chunks that the same steps wait for there."""
        readers: dict[tuple[int, int], list[int]] = {}
        for index, awaited in self.awaited.items():
            rank = self.steps[index].rank
            for writer in awaited:
                if self._is_stored_at(writer, rank):
                    readers.setdefault((writer, rank), []).append(index)
        chunks: dict[tuple[int, ...], list[int]] = {}
        for (writer, _), of_writer in readers.items():
            chunks.setdefault(tuple(of_writer), []).append(writer)
        return {store: tuple(chunks[tuple(of_writer)]) for store, of_writer in readers.items()}

    def _is_stored_at(self, writer: int, rank: int) -> bool:
        """Return whether it is a chunk that tiles of another rank store on `rank`."""
        by = self.steps[writer]
        return isinstance(by, MatmulChunk) and by.rank != rank and any(part.rank == rank for part in _writes(by, False))

    def _events(self, index: int) -> list[Announcement]:
        """Return the events that a step waits for. Of the steps that one in-order queue runs, the last is enough."""
        rank, awaited = self.steps[index].rank, self.awaited[index]
        last: dict[tuple[int, str], int] = {}
        for writer in (one for one in awaited if self.queues[one] in self.in_order):
            queue = self.steps[writer].rank, self.queues[writer]
            last[queue] = max(last.get(queue, writer), writer)
        last_ones = set(last.values())
        needed = (one for one in awaited if self.queues[one] not in self.in_order or one in last_ones)
        return [self._event(writer, rank) for writer in needed]

    def _event(self, writer: int, rank: int) -> Announcement:
        """Return the event "`writer` is done" as `rank` waits for it."""
        by, by_one = self.steps[writer], (writer,)
        if (chunks := self.stores.get((writer, rank))) is not None:
            return Announcement(ARRIVED, rank, chunks, True)
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
        return Announcement(TOLD, rank, by_one, in_parts and not self._needs_relay(writer))

    def _needs_relay(self, writer: int) -> bool:
        """Return whether peers learn of it by a relay: a kernel runs it, and that kernel pushes nothing to them."""
        return self.queues[writer] not in self.in_order and not isinstance(self.steps[writer], Put)

    def _number(self, event: Announcement) -> int:
        """Return the signal of an event. The first step that waits for it assigns a new one, and the notifies."""
        if event not in self.numbers:
            on_ranks = [event._replace(rank=rank) for rank in self._ranks_of(event)]
            number = max(self.used.get((event.pad, one.rank), 0) for one in on_ranks)
            for one in on_ranks:
                self.numbers[one] = number
                self.used[one.pad, one.rank] = number + 1
        if event not in self.notified:
            self.notified.add(event)
            notifying = self.by_relay if event.pad == TOLD and self._needs_relay(event.by[0]) else self.by_step
            for writer in event.by:
                notifying.setdefault(writer, []).append(event)
        return self.numbers[event]

    def _ranks_of(self, event: Announcement) -> set[int]:
        """Return the ranks on which the event has one number: all at which one tile stores, since a row of a tile table
        names one signal."""
        step = self.steps[event.by[0]]
        if isinstance(step, MatmulChunk) and event.pad == ARRIVED and len(event.by) == 1:
            return {part.rank for part in step.places or (step.region,) if part.rank != step.rank}
        return {event.rank}

    def _relay(self, index: int) -> Copy:
        """Return the copy of no data that waits for a kernel and notifies the peers that read what it wrote."""
        step, pad = self.steps[index], COMPUTED if isinstance(self.steps[index], MatmulChunk) else SUMMED
        done = Announcement(pad, step.rank, (index,), isinstance(step, MatmulChunk) or step.instances > 1)
        return Copy(
            name=f"tell.{step.name}",
            rank=step.rank,
            queue=RELAYS,
            waits=self._waits([done]),
            notifies=self._notifies(self.by_relay[index]),
            sources=(),
            destinations=(),
        )

    def _notifies(self, events: Iterable[Announcement]) -> tuple[Notify, ...]:
        return tuple(Notify(event.pad, event.rank, self.numbers[event]) for event in events)

    def _is_implied(self, writer: int, reader: int) -> bool:
        """Return whether the order of queues says that `writer` is done before `reader` starts."""
        if self.steps[writer].rank != self.steps[reader].rank or writer > reader:
            return False
        before, queue = self.queues[writer], self.queues[reader]
        return (before == queue and queue in self.in_order) or before in self.predecessors.get(queue, ())


class _Writers:
    """An index of the regions that steps write. parts: (buffer, rank) -> (first row and column, step, region), sorted;
    ends: (buffer, rank) -> the last row of all parts up to each one."""

    def __init__(self, steps: tuple[CommunicationStep, ...], tiles_read: bool) -> None:
        written: dict[tuple[str, int], list[tuple[tuple[int, int], int, Region]]] = {}
        for at, step in enumerate(steps):
            for part in _writes(step, tiles_read):
                written.setdefault((part.buffer, part.rank), []).append(((part.rows[0], part.cols[0]), at, part))
        self.parts = {memory: sorted(parts, key=lambda one: one[:2]) for memory, parts in written.items()}
        ends = {memory: (part.rows[1] for _, _, part in parts) for memory, parts in self.parts.items()}
        self.ends = {memory: list(accumulate(rows, max)) for memory, rows in ends.items()}

    def of(self, read: Region) -> Iterator[int]:
        """Yield the steps that write any element of `read`, by the first row that they write."""
        memory = read.buffer, read.rank
        parts, (lo, hi) = self.parts.get(memory, []), read.rows
        for at in range(bisect_right(self.ends[memory], lo) if parts else 0, len(parts)):
            (first, _), step, part = parts[at]
            if first >= hi:
                return
            if overlap(part, read):
                yield step


def _reads(step: CommunicationStep, tiles_read: bool) -> tuple[Region, ...]:
    """Return what a step waits to read; of a chunk that the matmul writes, what is added to it."""
    return step.addends if isinstance(step, MatmulChunk) and not tiles_read else step.reads


def _writes(step: CommunicationStep, tiles_read: bool) -> tuple[Region, ...]:
    """Return what a step writes that others read; of a matmul's chunk, its product."""
    if isinstance(step, MatmulChunk):
        return step.into if tiles_read else step.places or (step.region,)
    return step.writes


def _both_add(one: CommunicationStep, other: CommunicationStep) -> bool:
    """Return whether both add to what lies there: then neither waits for the other."""
    return isinstance(one, ReducePut) and isinstance(other, ReducePut)
