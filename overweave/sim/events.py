"""Discrete-event primitives: one event queue for all ranks, gates that open, signals that count."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Callback = Callable[[], None]
SignalKey = tuple[int, str, int]  # rank, pad, index


class EventQueue:
    """Runs actions in order of time, then of scheduling. Times are microseconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callback]] = []
        self._sequence = 0

    def at(self, time_us: float, action: Callback) -> None:
        self._sequence += 1
        heappush(self._events, (time_us if time_us > self.now else self.now, self._sequence, action))

    def after(self, delay_us: float, action: Callback) -> None:
        self._sequence += 1  # as `at`, without a call: most events come this way
        heappush(self._events, (self.now + delay_us if delay_us > 0.0 else self.now, self._sequence, action))

    def run(self) -> None:
        events = self._events
        while events:
            self.now, _, action = heappop(events)
            action()


class Gate:
    """Runs `action` once, when `arrive` has been called as often as `expect`."""

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
        self._counts: dict[SignalKey, int] = {}  # signal -> its value
        self._gates: dict[SignalKey, list[tuple[int, Gate]]] = {}  # signal -> counts and the gates that expect them

    def wait(self, key: SignalKey, count: int, gate: Gate) -> None:
        """Make `gate` expect the signal to reach `count`. Call it before the run."""
        self._gates.setdefault(key, []).append((count, gate.expect()))

    def add(self, key: SignalKey, amount: int) -> None:
        """Add to a signal and open the gates whose count it reaches."""
        reached = self._counts[key] = self._counts.get(key, 0) + amount
        gates = self._gates.get(key)
        if not gates:
            return
        self._gates[key] = [(count, gate) for count, gate in gates if count > reached]
        for count, gate in gates:
            if count <= reached:
                gate.arrive()
