"""Copies between ranks as flows: copies that share a port, or a link of the topology, slow each other down.

A flow's speed is a share of what it reaches alone. When a flow begins or ends, only the flows that share a port or a
link with it are dealt anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from overweave.hardware.machine import Machine
from overweave.hardware.topology import Endpoint, Hop
from overweave.sim.cost import Segment
from overweave.sim.events import Callback, EventQueue

SharedLink = tuple[Endpoint, Endpoint]  # a link in one direction, or a port: out of a rank, or into it


class _Path(NamedTuple):
    """What a copy between two ranks shares: their ports and the links of its route. wide: how many copies, as fast as
    one alone on this route, each link passes.
    """

    shared: tuple[SharedLink, ...]
    wide: tuple[tuple[Hop, float], ...]


class _Flow:
    """A copy under way. version: of its speed; a wake-up that was asked for at another speed is late."""

    __slots__ = ("done", "left_us", "path", "segment", "shared", "speed", "updated_us", "version")

    def __init__(self, segment: Segment, path: _Path, done: Callback, now_us: float) -> None:
        self.segment, self.path, self.shared, self.done = segment, path, path.shared, done
        self.left_us, self.updated_us = segment.alone_us, now_us
        self.speed, self.version = 0.0, 0


class Ports:
    """All ports and links of a machine. `changed(rank, load)` hears how busy a rank's ports are: 1 is full traffic both
    ways.
    """

    def __init__(self, clock: EventQueue, machine: Machine, changed: Callable[[int, float], None]) -> None:
        self._clock, self._changed, self._routes = clock, changed, machine.routes
        alone = machine.links.push.peak_gb_per_s
        self._crowd = machine.links.all_peers.peak_gb_per_s / alone
        self._full = machine.engines_gb_per_s / alone
        self._alone_gb_per_s = alone
        # A copy within a rank reads and writes its memory: at so much of what full traffic both ways does.
        is_dma = machine.local_copies.by == "dma"
        self._local = machine.local_copies.gb_per_s / machine.engines_gb_per_s / 2 if is_dma else 0.0
        self._within: dict[int, int] = {}
        self._flows: dict[SharedLink, dict[_Flow, None]] = {}  # in the order in which they began
        self._of_rank: dict[int, dict[_Flow, None]] = {}
        self._loads: dict[int, float] = {}
        self._untold: set[int] = set()  # ranks whose load has changed, told once at the end of an instant
        self._paths: dict[tuple[int, int], _Path] = {}

    def copy(self, segment: Segment, done: Callback) -> None:
        """Starts a copy now; `done` runs at its end."""
        if segment.source == segment.target:
            self._copy_within(segment, done)
            return
        flow = _Flow(segment, self._path(segment.source, segment.target), done, self._clock.now)
        for each in flow.shared:
            self._flows.setdefault(each, {})[flow] = None
        for rank in (segment.source, segment.target):
            self._of_rank.setdefault(rank, {})[flow] = None
        self._deal(flow)

    def _copy_within(self, segment: Segment, done: Callback) -> None:
        """By a DMA engine, which shares no port and reads and writes the memory of one rank."""
        rank = segment.source

        def end() -> None:
            self._within[rank] -= 1
            self._tell([rank])
            done()

        self._within[rank] = self._within.get(rank, 0) + 1
        self._tell([rank])
        self._clock.after(segment.alone_us, end)

    def _path(self, source: int, target: int) -> _Path:
        """Of a copy between two ranks."""
        pair = source, target
        if pair not in self._paths:
            hops, curves = self._routes.between(source, target), self._routes.curves
            alone = min(self._alone_gb_per_s, self._routes.alone_gb_per_s(source, target))
            wide = tuple((hop, curves[hop].peak_gb_per_s / alone) for hop in hops)
            self._paths[pair] = _Path(((source, "out"), ("into", target), *hops), wide)
        return self._paths[pair]

    def _deal(self, changed: _Flow) -> None:
        """Deals ports and links anew to the flows that share one with a flow that begins or ends."""
        others: dict[_Flow, None] = {}
        for each in changed.shared:
            others.update(self._flows[each])
        ranks = {changed.segment.source, changed.segment.target}
        for flow in others:
            speed = self._speed(flow)
            if speed != flow.speed:
                self._set_speed(flow, speed)
                ranks |= {flow.segment.source, flow.segment.target}
        self._tell(ranks)

    def _speed(self, flow: _Flow) -> float:
        """The least that a port or a link leaves it."""
        flows, (out, into) = self._flows, flow.shared[:2]
        sharers = max(len(flows[out]), len(flows[into]))
        speed = 1.0 if sharers == 1 else min(1.0, self._crowd / sharers)
        for hop, wide in flow.path.wide:
            sharers = len(flows[hop])
            if sharers > 1 and wide < speed * sharers:
                speed = wide / sharers
        return speed

    def _set_speed(self, flow: _Flow, speed: float) -> None:
        now = self._clock.now
        flow.left_us -= (now - flow.updated_us) * flow.speed
        flow.updated_us, flow.speed = now, speed
        flow.version += 1
        self._clock.after(max(flow.left_us, 0.0) / speed, partial(self._wake, flow, flow.version))

    def _tell(self, ranks: Iterable[int]) -> None:
        """Whoever listens hears of the loads that changed, when all that happens now has happened."""
        if not self._untold:
            self._clock.after(0.0, self._tell_all)
        self._untold.update(ranks)

    def _tell_all(self) -> None:
        ranks, self._untold = sorted(self._untold), set()
        for rank in ranks:
            load = sum(flow.speed for flow in self._of_rank.get(rank, ())) / self._full / 2
            load += self._within.get(rank, 0) * self._local
            if load != self._loads.get(rank, 0.0):
                self._loads[rank] = load
                self._changed(rank, load)

    def _wake(self, flow: _Flow, version: int) -> None:
        """The flow ends, unless its speed has changed since it was asked to."""
        if version != flow.version:
            return
        for each in flow.shared:
            del self._flows[each][flow]
        for rank in (flow.segment.source, flow.segment.target):
            del self._of_rank[rank][flow]
        self._deal(flow)
        flow.done()
