"""Signals are numbered when a waiter is found for the event that they announce: what nobody waits for has no signal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from overweave.ir.schedule import Notify, Wait
from overweave.schedules.communication import ARRIVED, COMPUTED, SUMMED

TOLD = "told"  # a pad: the peer that the signal comes from has completed what the waiter reads, or must come after
PADS = (COMPUTED, SUMMED, ARRIVED, TOLD)

What = tuple[object, ...]


class Event(Struct, frozen=True):
    """Something that a signal on `rank`, in `pad`, announces. what: names it; the same on every rank that waits for it.

    in_parts: a kernel announces it, part by part, so that the signal counts higher than one.
    """

    pad: str
    rank: int
    what: What
    in_parts: bool = False


class SignalNumbers(Struct):
    """The number of each event's signal among those of its pad and rank.

    told: for each thing that happens, the events by which ranks wait for it. counts: signals in use, of a pad and rank.
    """

    signals: dict[Event, int] = {}
    told: dict[What, list[Event]] = {}
    counts: dict[tuple[str, int], int] = {}

    def number(self, event: Event) -> int:
        """The signal of an event: a new one if no waiter has asked for that event before."""
        if event not in self.signals:
            place = (event.pad, event.rank)
            self.signals[event] = self.counts.get(place, 0)
            self.counts[place] = self.signals[event] + 1
            self.told.setdefault(event.what, []).append(event)
        return self.signals[event]

    def waits(self, events: Iterable[Event]) -> tuple[Wait, ...]:
        """The waits for all of the events. Consecutive signals of a pad whose counts are alike become one range."""
        numbered = {(PADS.index(event.pad), self.number(event), event.in_parts) for event in events}
        waits: list[Wait] = []
        before: tuple[int, int, bool] | None = None
        for at, signal, in_parts in sorted(numbered):
            if before == (at, signal - 1, in_parts):
                waits[-1] = Wait(PADS[at], (waits[-1].signals[0], signal + 1), 1)
            else:
                waits.append(Wait(PADS[at], (signal, signal + 1), 1))
            before = (at, signal, in_parts)
        return tuple(waits)

    def notifies(self, what: What) -> tuple[Notify, ...]:
        """The notifies of the operation that does `what`: one for each rank that waits for it."""
        return tuple(Notify(event.pad, event.rank, self.signals[event]) for event in self.told.get(what, ()))

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Every pad in use with its size: as many signals as the rank with the most of them has."""
        for pad in PADS:
            size = max((count for (name, _), count in self.counts.items() if name == pad), default=0)
            if size:
                yield pad, size
