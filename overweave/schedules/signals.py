"""Derive the waits and notifies of a communication: a step that reads a region waits for the steps that write it.

Every region is written once in a call, or added to. A wait is left out where the order of queues implies it: a stream
or a copy engine completes its steps in order. A kernel signals on its own rank alone. Where peers read what it wrote,
a relay notifies them: a step without data on a side stream, which waits for the kernel. Tiles that store at a peer
notify that peer themselves: all the tiles that one step waits for add to one signal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.schedule import (
    Apply,
    Copy,
    Get,
    Notify,
    Operation,
    Put,
    Queue,
    Range,
    ReducePut,
    Region,
    SignalPad,
    Wait,
    overlap,
)
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


# Remove waits that another wait implies.
#
# A stream or a copy engine notifies in order: a step that waits for a later piece has the earlier ones, too. Every
# signal must still be waited for by some step, so that it can be used again. A row of a tile table holds one range of
# signals and one more signal: if the fewest waits do not fit, all waits stay, and those between them join their range.


PadSignal = tuple[str, int]  # pad and number, on the waiter's own rank
Sender = tuple[int, str, int]  # rank, queue, place in the launch order
LaunchPositions = Mapping[tuple[int, str], int]  # of a rank's operations, by name, in the order of their launch


def without_implied_waits(
    applies: list[Apply], communications: Iterable[Communication], places: LaunchPositions
) -> Iterator[Apply]:
    """Yield the kernel calls of one rank without waits that others of the same call imply, the rest as ranges.

    places: launch positions of all ranks' moves; moves of several tensors may share a queue.
    """
    if not applies:
        return
    known = list(communications)
    senders = _senders(known, applies[0].rank, places)
    pads = [pad.name for communication in known for pad in communication.pads]
    all_waits = [_expanded(apply.waits) for apply in applies]
    needed = [_without_implied(waits, senders) for waits in all_waits]
    late = {signal for apply in applies for signal in _expanded(apply.late_waits)}
    awaited = late.union(*needed)
    for waits, fewer in zip(all_waits, needed, strict=True):
        fewer |= {signal: count for signal, count in waits.items() if signal not in awaited}
        awaited |= fewer.keys()
    for apply, fewer, waits in zip(applies, needed, all_waits, strict=True):
        ranges = _as_ranges(fewer, pads)
        yield replace(apply, waits=ranges if fits_tile_row(ranges) else _as_ranges(_without_gaps(waits, senders), pads))


def without_repeated_waits(operations: Iterable[Operation], queues: Iterable[Queue]) -> Iterator[Operation]:
    """Yield the operations without waits that an earlier operation of the same in-order queue has made already."""
    ordered = {queue.name for queue in queues if queue.order == COMPLETE}
    seen: dict[tuple[int, str], set[PadSignal]] = {}
    for operation in operations:
        if operation.queue not in ordered or not operation.waits:
            yield operation
            continue
        known = seen.setdefault((operation.rank, operation.queue), set())
        waits = tuple(wait for wait in operation.waits if not _expanded((wait,)).keys() <= known)
        known.update(_expanded(operation.waits))
        yield replace(operation, waits=waits)


def fits_tile_row(waits: tuple[Wait, ...]) -> bool:
    """Return whether a row of a tile table holds the waits: a range of signals, and one more signal."""
    lengths = sorted((wait.signals[1] - wait.signals[0] for wait in waits), reverse=True)
    return len(lengths) <= 2 and all(length <= 1 for length in lengths[1:])


def _senders(communications: list[Communication], rank: int, places: LaunchPositions) -> dict[PadSignal, list[Sender]]:
    """Return signal of `rank` -> the steps that notify it. A step outside in-order queues has the queue ""."""
    senders: dict[PadSignal, list[Sender]] = {}
    for communication in communications:
        ordered = {queue.name for queue in communication.queues if queue.order == COMPLETE}
        for step in communication.steps:
            queue = "" if isinstance(step, MatmulChunk) or step.queue not in ordered else step.queue
            for notify in step.notifies:
                if notify.rank == rank:
                    place = places.get((step.rank, step.name), -1)
                    senders.setdefault((notify.pad, notify.signal), []).append((step.rank, queue, place))
    return senders


def _without_implied(waits: dict[PadSignal, int], senders: dict[PadSignal, list[Sender]]) -> dict[PadSignal, int]:
    """Return the waits without those whose only sender precedes that of another wait in an in-order queue."""
    latest: dict[tuple[int, str], int] = {}
    for signal in waits:
        for rank, queue, place in senders.get(signal, []):
            latest[rank, queue] = max(latest.get((rank, queue), -1), place)

    def is_implied(signal: PadSignal) -> bool:
        one = senders.get(signal, [])
        return len(one) == 1 and bool(one[0][1]) and latest[one[0][0], one[0][1]] > one[0][2]

    return {signal: count for signal, count in waits.items() if not is_implied(signal)}


def _without_gaps(waits: dict[PadSignal, int], senders: dict[PadSignal, list[Sender]]) -> dict[PadSignal, int]:
    """Return the waits, and those for the signals between them if steps notify all of these (of no rows)."""
    filled = dict(waits)
    for pad in {pad for pad, _ in waits}:
        numbers = [signal for one, signal in waits if one == pad]
        between = [(pad, signal) for signal in range(min(numbers), max(numbers))]
        if len({waits[pad, signal] for signal in numbers}) == 1 and all(signal in senders for signal in between):
            filled |= dict.fromkeys(between, waits[pad, numbers[0]])
    return filled


def _expanded(waits: Iterable[Wait]) -> dict[PadSignal, int]:
    """Return signal -> count of all signals in the ranges."""
    return {(wait.pad, signal): wait.count for wait in waits for signal in range(*wait.signals)}


def _as_ranges(waits: dict[PadSignal, int], pads: list[str]) -> tuple[Wait, ...]:
    """Return the waits, consecutive signals of a pad with one count as a range."""
    ranges: list[Wait] = []
    for pad, signal in sorted(waits, key=lambda one: (pads.index(one[0]), one[1])):
        count = waits[pad, signal]
        last = ranges[-1] if ranges else None
        if last and (last.pad, last.signals[1], last.count) == (pad, signal, count):
            ranges[-1] = Wait(pad, (last.signals[0], signal + 1), count)
        else:
            ranges.append(Wait(pad, (signal, signal + 1), count))
    return tuple(ranges)
