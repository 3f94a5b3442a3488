"""The parts a discrete-event run is made of: one clock for all ranks, gates that open, signals that count."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Callback = Callable[[], None]
SignalKey = tuple[int, str, int]  # rank, pad, index


class EventQueue:
    """Runs actions in order of time; those of one time in the order they were asked for. Times are microseconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callback]] = []
        self._asked = 0

    def at(self, time_us: float, action: Callback) -> None:
        self._asked += 1
        heappush(self._events, (max(time_us, self.now), self._asked, action))

    def after(self, delay_us: float, action: Callback) -> None:
        self.at(self.now + delay_us, action)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, action = heappop(self._events)
            action()


class Gate:
    """Opens, and runs `action` once, when everything it was told to expect has arrived."""

    __slots__ = ("_action", "missing")

    def __init__(self, action: Callback) -> None:
        self.missing = 0
        self._action = action

    def expect(self) -> Gate:
        self.missing += 1
        return self

    def arrive(self) -> None:
        self.missing -= 1
        if self.missing == 0:
            self._action()


class SignalCounters:
    """Counters, and the gates that wait for them."""

    def __init__(self) -> None:
        self._counts: dict[SignalKey, int] = {}
        self._waiting: dict[SignalKey, list[tuple[int, Gate]]] = {}

    def wait(self, key: SignalKey, count: int, gate: Gate) -> None:
        """`gate` expects the signal to reach `count`. To be asked before the run."""
        self._waiting.setdefault(key, []).append((count, gate.expect()))

    def add(self, key: SignalKey, amount: int) -> None:
        reached = self._counts[key] = self._counts.get(key, 0) + amount
        waiting = self._waiting.get(key)
        if not waiting:
            return
        self._waiting[key] = [(count, gate) for count, gate in waiting if count > reached]
        for count, gate in waiting:
            if count <= reached:
                gate.arrive()
