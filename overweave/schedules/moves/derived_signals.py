"""Signals of steps that say only what they read and write: whoever reads a region waits for the steps that write it.

Every region is written once in a call, or added to. A wait is left out where the order of queues implies it. What tiles
write and peers read is told to them by a stream, which waits for the tiles; what tiles store at a peer, they announce
there themselves: the tiles that one step waits for on one signal, whose count is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from overweave.ir.schedule import Copy, Notify, Operation, Queue, ReducePut, Region, SignalPad
from overweave.ir.verify.rules.races import overlap
from overweave.schedules.communication import ARRIVED, COMPLETE, COMPUTED, SUMMED, TELLERS, TILES, Chunk
from overweave.schedules.moves.signal_numbers import TOLD, Event, SignalNumbers

Step = Operation | Chunk


class Behind(NamedTuple):
    """A step that also waits for whatever writes `reads`, which it does not read."""

    step: Step
    reads: tuple[Region, ...]


def with_signals(
    steps: Iterable[Step | Behind], queues: Sequence[Queue]
) -> tuple[tuple[Step, ...], tuple[SignalPad, ...]]:
    """The same steps with waits and notifies, and the pads of their signals. Queues that wait for Chunks name TILES."""
    derived = _Signals([one if isinstance(one, Behind) else Behind(one, ()) for one in steps], queues)
    made = tuple(derived.steps())
    return made, tuple(SignalPad(pad, size) for pad, size in derived.numbers.sizes())


class _Signals:
    """Events are numbered in the order of their readers, so that those of one reader are neighbours."""

    def __init__(self, listed: list[Behind], queues: Sequence[Queue]) -> None:
        self.listed = listed
        self.after = {queue.name: queue.after for queue in queues}
        self.complete = {queue.name for queue in queues if queue.order == COMPLETE}
        self.numbers = SignalNumbers()
        self.announced: dict[int, dict[Event, None]] = {}  # by the steps at these places of the list
        self.tells: dict[int, dict[Event, None]] = {}  # by a stream that waits for the tiles of a step
        self.writers: dict[tuple[str, int], list[tuple[Region, int]]] = {}
        for at, (step, _) in enumerate(listed):
            for part in _writes(step):
                self.writers.setdefault((part.buffer, part.rank), []).append((part, at))
        self._number_alike()

    def _number_alike(self) -> None:
        """What tiles store on several ranks has the same number on all: a tile announces one signal."""
        ranks = range(1 + max((step.rank for step, _ in self.listed), default=0))
        for at, (step, _) in enumerate(self.listed):
            if isinstance(step, Chunk) and step.copies:
                for rank in ranks:
                    self.numbers.number(Event(TOLD, rank, ("step", at), True))

    def steps(self) -> Iterator[Step]:
        waiting = list(self._waiting())
        told = {at: self._tell(at) for at in self.tells}
        for at, step in enumerate(waiting):
            yield replace(step, notifies=self._notifies(self.announced.get(at, ())))
            if at in told:
                yield told[at]

    def _waiting(self) -> Iterator[Step]:
        for at, (step, behind) in enumerate(self.listed):
            waits = self.numbers.waits(self._events(at, (*_reads(step), *behind)))
            yield replace(step, late_waits=waits) if isinstance(step, Chunk) else replace(step, waits=waits)

    def _events(self, at: int, reads: Iterable[Region]) -> list[Event]:
        step = self.listed[at].step
        found: dict[Event, None] = {}
        stored: dict[int, None] = {}
        for part in reads:
            for written, writer in self.writers.get((part.buffer, part.rank), ()):
                (lo, hi), (first, end) = written.rows, part.rows
                if lo >= end or first >= hi or writer == at or not overlap(written, part):
                    continue
                by = self.listed[writer].step
                if self._is_implied(writer, at) or (isinstance(step, ReducePut) and isinstance(by, ReducePut)):
                    continue
                if isinstance(by, Chunk) and by.rank != part.rank and not by.copies:
                    stored[writer] = None
                else:
                    found[self._event(writer, step.rank)] = None
        if stored:
            event = Event(ARRIVED, step.rank, ("stored", *stored), True)
            found[event] = None
            for writer in stored:
                self.announced.setdefault(writer, {})[event] = None
        return list(found)

    def _event(self, writer: int, rank: int) -> Event:
        """That a step is done, for a rank to wait for."""
        by = self.listed[writer].step
        is_tiles, in_parts = isinstance(by, Chunk), isinstance(by, Chunk) or by.instances > 1
        if isinstance(by, Chunk) and by.copies and by.rank != rank:
            event = Event(TOLD, rank, ("step", writer), True)
        elif by.rank == rank:
            event = Event(COMPUTED if is_tiles else SUMMED, rank, ("step", writer), in_parts)
        elif is_tiles:
            event = Event(TOLD, rank, ("told", writer))
            self.tells.setdefault(writer, {})[event] = None
            return event
        else:
            event = Event(ARRIVED if _writes_at(by, rank) else TOLD, rank, ("step", writer), in_parts)
        self.announced.setdefault(writer, {})[event] = None
        return event

    def _is_implied(self, writer: int, reader: int) -> bool:
        one, other = self.listed[writer].step, self.listed[reader].step
        if one.rank != other.rank or writer > reader:
            return False
        before, queue = _queue(one), _queue(other)
        return (before == queue and queue in self.complete) or before in self.after.get(queue, ())

    def _tell(self, at: int) -> Copy:
        """Tells peers that what tiles have written may be read."""
        step = self.listed[at].step
        done = Event(COMPUTED, step.rank, ("step", at), True)
        self.announced.setdefault(at, {})[done] = None
        waits, notifies = self.numbers.waits([done]), self._notifies(self.tells[at])
        name = f"tell.{step.name.partition('.')[2]}"
        return Copy(
            name=name, rank=step.rank, queue=TELLERS, waits=waits, notifies=notifies, sources=(), destinations=()
        )

    def _notifies(self, events: Iterable[Event]) -> tuple[Notify, ...]:
        return tuple(Notify(event.pad, event.rank, self.numbers.number(event)) for event in events)


def _queue(step: Step) -> str:
    return TILES if isinstance(step, Chunk) else step.queue


def _reads(step: Step) -> tuple[Region, ...]:
    return step.addends if isinstance(step, Chunk) else step.reads


def _writes(step: Step) -> tuple[Region, ...]:
    return (step.region, *step.copies) if isinstance(step, Chunk) else step.writes


def _writes_at(step: Step, rank: int) -> bool:
    return any(part.rank == rank for part in _writes(step))
