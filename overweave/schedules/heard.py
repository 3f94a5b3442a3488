"""Who hears of what: signals are numbered as somebody is found to wait for what they announce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from overweave.ir.schedule import Notify, Wait
from overweave.schedules.communication import ARRIVED, COMPUTED, SUMMED

TOLD = "told"  # a peer says that what is to be read there, or to be waited for, is over
PADS = (COMPUTED, SUMMED, ARRIVED, TOLD)

What = tuple[object, ...]


class Event(Struct, frozen=True):
    """Something that `rank` hears of by a signal of a pad. in_parts: it counts more than one, as of kernels."""

    pad: str
    rank: int
    what: What
    in_parts: bool = False


class Heard(Struct):
    """The signals of all events that are waited for."""

    signals: dict[Event, int] = {}
    told: dict[What, list[Event]] = {}
    counts: dict[tuple[str, int], int] = {}

    def number(self, event: Event) -> int:
        """Its signal, a new one if nobody has waited for it before."""
        if event not in self.signals:
            place = (event.pad, event.rank)
            self.signals[event] = self.counts.get(place, 0)
            self.counts[place] = self.signals[event] + 1
            self.told.setdefault(event.what, []).append(event)
        return self.signals[event]

    def waits(self, events: Iterable[Event]) -> tuple[Wait, ...]:
        """For all of them, neighbours that count alike as one range."""
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
        """To everybody who hears of it."""
        return tuple(Notify(event.pad, event.rank, self.signals[event]) for event in self.told.get(what, ()))

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Of every pad in use, its signals on the rank that hears most."""
        for pad in PADS:
            size = max((count for (name, _), count in self.counts.items() if name == pad), default=0)
            if size:
                yield pad, size
