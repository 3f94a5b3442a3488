"""Copies between ranks as flows: each rank has one port out and one in, and copies that share a port slow down."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from overweave.hardware.machine import Machine
from overweave.sim.cost import Segment
from overweave.sim.events import Action, Clock

_DONE_US = 1e-6  # rounding of the clock: what is left of a flow that ends now


class _Flow:
    __slots__ = ("done", "left_us", "segment", "speed")

    def __init__(self, segment: Segment, done: Action) -> None:
        self.segment = segment
        self.left_us = segment.alone_us
        self.speed = 1.0
        self.done = done


class Ports:
    """All ports of a machine. `changed(rank, load)` hears how busy a rank's ports are: 1 is full traffic both ways."""

    def __init__(self, clock: Clock, machine: Machine, changed: Callable[[int, float], None]) -> None:
        self._clock = clock
        self._changed = changed
        self._crowd = machine.links.all_peers.peak_gb_per_s / machine.links.push.peak_gb_per_s
        self._flows: list[_Flow] = []
        self._loads: dict[int, float] = {}
        self._updated_us = 0.0
        self._version = 0

    def copy(self, segment: Segment, done: Action) -> None:
        """Starts a copy now; `done` runs at its end."""
        if segment.source == segment.target:
            self._clock.after(segment.alone_us, done)
            return
        self._advance()
        self._flows.append(_Flow(segment, done))
        self._share()

    def _advance(self) -> None:
        passed = self._clock.now - self._updated_us
        self._updated_us = self._clock.now
        for flow in self._flows:
            flow.left_us -= passed * flow.speed

    def _share(self) -> None:
        """Deals the ports to the flows and asks to be woken when the next one ends."""
        out = Counter(flow.segment.source for flow in self._flows)
        into = Counter(flow.segment.target for flow in self._flows)
        before, self._loads = self._loads, defaultdict(float)
        for flow in self._flows:
            source, target = flow.segment.source, flow.segment.target
            sharers = max(out[source], into[target])
            flow.speed = 1.0 if sharers == 1 else self._crowd / sharers
            self._loads[source] += flow.speed / 2
            self._loads[target] += flow.speed / 2
        for rank in sorted(before.keys() | self._loads.keys()):
            if self._loads.get(rank, 0.0) != before.get(rank, 0.0):
                self._changed(rank, self._loads.get(rank, 0.0))
        self._version += 1
        if self._flows:
            version = self._version
            soonest = min(flow.left_us / flow.speed for flow in self._flows)
            self._clock.after(soonest, lambda: self._wake(version))

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        finished = [flow for flow in self._flows if flow.left_us <= _DONE_US]
        self._flows = [flow for flow in self._flows if flow.left_us > _DONE_US]
        self._share()
        for flow in finished:
            flow.done()
