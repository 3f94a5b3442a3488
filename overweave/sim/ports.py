"""Copies between ranks as flows: copies that share a port, or a link of the topology, slow each other down.

A flow's speed is a fraction of its bandwidth alone. When a flow begins or ends, bandwidth is reallocated among the
flows that share a port or a link with it.
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
    """The route of a copy between two ranks. shared: their ports and its links. capacities: link -> how many copies it
    carries at the full speed of one copy on this route.
    """

    shared: tuple[SharedLink, ...]
    capacities: tuple[tuple[Hop, float], ...]


class _Flow:
    """A copy in flight. version: counts changes of its speed; a completion event of an older version is stale."""

    __slots__ = ("left_us", "on_end", "path", "segment", "shared", "speed", "updated_us", "version")

    def __init__(self, segment: Segment, path: _Path, on_end: Callback, now_us: float) -> None:
        self.segment, self.path, self.shared, self.on_end = segment, path, path.shared, on_end
        self.left_us, self.updated_us = segment.alone_us, now_us
        self.speed, self.version = 0.0, 0


class Ports:
    """All ports and links of a machine. on_load_change: called with a rank and the load of its ports; 1 is full traffic
    in both directions.
    """

    def __init__(self, clock: EventQueue, machine: Machine, on_load_change: Callable[[int, float], None]) -> None:
        self._clock, self._on_load_change, self._routes = clock, on_load_change, machine.routes
        alone_gb_per_s = machine.links.push.peak_gb_per_s
        self._shared_peak_ratio = machine.links.all_peers.peak_gb_per_s / alone_gb_per_s
        self._full_ratio = machine.engines_gb_per_s / alone_gb_per_s
        self._alone_gb_per_s = alone_gb_per_s
        # The load of a copy within a rank, which reads and writes its memory.
        is_dma = machine.local_copies.by == "dma"
        self._local_load = machine.local_copies.gb_per_s / machine.engines_gb_per_s / 2 if is_dma else 0.0
        self._local_copies: dict[int, int] = {}  # rank -> copies within it
        self._flows: dict[SharedLink, dict[_Flow, None]] = {}  # link -> flows, in the order in which they began
        self._of_rank: dict[int, dict[_Flow, None]] = {}  # rank -> flows out of it and into it
        self._loads: dict[int, float] = {}  # rank -> load that was reported last
        self._changed_ranks: set[int] = set()  # ranks whose load has changed, reported once at the end of an instant
        self._paths: dict[tuple[int, int], _Path] = {}  # (source, target) -> route

    def copy(self, segment: Segment, on_end: Callback) -> None:
        """Start a copy now; call `on_end` at its end."""
        if segment.source == segment.target:
            self._copy_within(segment, on_end)
            return
        flow = _Flow(segment, self._path(segment.source, segment.target), on_end, self._clock.now)
        for link in flow.shared:
            self._flows.setdefault(link, {})[flow] = None
        for rank in (segment.source, segment.target):
            self._of_rank.setdefault(rank, {})[flow] = None
        self._reallocate(flow)

    def _copy_within(self, segment: Segment, on_end: Callback) -> None:
        """Start a copy within one rank, by a DMA engine: it shares no port, but loads the rank's memory."""
        rank = segment.source

        def end() -> None:
            self._local_copies[rank] -= 1
            self._mark_changed([rank])
            on_end()

        self._local_copies[rank] = self._local_copies.get(rank, 0) + 1
        self._mark_changed([rank])
        self._clock.after(segment.alone_us, end)

    def _path(self, source: int, target: int) -> _Path:
        """Return the route of a copy between two ranks."""
        pair = source, target
        if pair not in self._paths:
            hops, curves = self._routes.between(source, target), self._routes.curves
            alone_gb_per_s = min(self._alone_gb_per_s, self._routes.alone_gb_per_s(source, target))
            capacities = tuple((hop, curves[hop].peak_gb_per_s / alone_gb_per_s) for hop in hops)
            self._paths[pair] = _Path(((source, "out"), ("into", target), *hops), capacities)
        return self._paths[pair]

    def _reallocate(self, changed: _Flow) -> None:
        """Reallocate bandwidth to the flows that share a port or a link with a flow that begins or ends."""
        others: dict[_Flow, None] = {}
        for link in changed.shared:
            others.update(self._flows[link])
        ranks = {changed.segment.source, changed.segment.target}
        for flow in others:
            speed = self._speed(flow)
            if speed != flow.speed:
                self._set_speed(flow, speed)
                ranks |= {flow.segment.source, flow.segment.target}
        self._mark_changed(ranks)

    def _speed(self, flow: _Flow) -> float:
        """Return a flow's speed: the least of its shares of its ports and links."""
        flows, (out, into) = self._flows, flow.shared[:2]
        sharers = max(len(flows[out]), len(flows[into]))
        speed = 1.0 if sharers == 1 else min(1.0, self._shared_peak_ratio / sharers)
        for hop, capacity in flow.path.capacities:
            sharers = len(flows[hop])
            if sharers > 1 and capacity < speed * sharers:
                speed = capacity / sharers
        return speed

    def _set_speed(self, flow: _Flow, speed: float) -> None:
        """Set a flow's speed and schedule its completion."""
        now = self._clock.now
        flow.left_us -= (now - flow.updated_us) * flow.speed
        flow.updated_us, flow.speed = now, speed
        flow.version += 1
        self._clock.after(max(flow.left_us, 0.0) / speed, partial(self._on_completion, flow, flow.version))

    def _mark_changed(self, ranks: Iterable[int]) -> None:
        """Schedule a report of the loads of some ranks, after all other events of this instant."""
        if not self._changed_ranks:
            self._clock.after(0.0, self._report_loads)
        self._changed_ranks.update(ranks)

    def _report_loads(self) -> None:
        """Report the loads that have changed."""
        ranks, self._changed_ranks = sorted(self._changed_ranks), set()
        for rank in ranks:
            load = sum(flow.speed for flow in self._of_rank.get(rank, ())) / self._full_ratio / 2
            load += self._local_copies.get(rank, 0) * self._local_load
            if load != self._loads.get(rank, 0.0):
                self._loads[rank] = load
                self._on_load_change(rank, load)

    def _on_completion(self, flow: _Flow, version: int) -> None:
        """End the flow, unless this completion event is stale: the flow's speed has changed since."""
        if version != flow.version:
            return
        for link in flow.shared:
            del self._flows[link][flow]
        for rank in (flow.segment.source, flow.segment.target):
            del self._of_rank[rank][flow]
        self._reallocate(flow)
        flow.on_end()
