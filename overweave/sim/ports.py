"""Copies between ranks as flows: copies that share a port, or a link of the topology, slow each other down.

A flow's speed is a fraction of its bandwidth alone. After the instant in which flows begin or end, bandwidth is
reallocated among those that share a port or a link with one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from overweave.hardware.machine import Machine
from overweave.hardware.topology import Endpoint, Hop
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import COPY_ENGINE, COPY_KERNEL, REDUCE_KERNEL, TILE_KERNEL, Plan
from overweave.ir.schedule import Compute, Get, Operation, Put, Reduce, Region
from overweave.ir.timeline.timeline import Timeline
from overweave.sim.cost import Segment
from overweave.sim.events import Callback, EventQueue

SharedLink = tuple[Endpoint, Endpoint]  # a link in one direction, or a port: out of a rank, or into it


class _Path(NamedTuple):
    """The route of a copy between two ranks. shared: their ports and its links. capacities: link -> how many copies it
    carries at the full speed of one copy on this route. ports: of the ranks, out and into; () between islands, where a
    library's messages pass NICs.
    """

    shared: tuple[SharedLink, ...]
    capacities: tuple[tuple[Hop, float], ...]
    ports: tuple[SharedLink, ...]


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
        self._touched_links: dict[SharedLink, None] = {}  # whose flows have changed in this instant
        self._paths: dict[tuple[int, int], _Path] = {}  # (source, target) -> route

    def copy(self, segment: Segment, on_end: Callback) -> None:
        """Start a copy now; call `on_end` at its end."""
        if segment.source == segment.target:
            self._copy_within(segment, on_end)
            return
        flow = _Flow(segment, self._path(segment.source, segment.target), on_end, self._clock.now)
        for link in flow.shared:
            self._flows.setdefault(link, {})[flow] = None
        for rank in (segment.source, segment.target) if flow.path.ports else ():
            self._of_rank.setdefault(rank, {})[flow] = None
        self._touch(flow)

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
            hops, peaks_gb_per_s = self._routes.between(source, target), self._routes.peaks_gb_per_s
            alone_gb_per_s = min(self._alone_gb_per_s, self._routes.alone_gb_per_s(source, target))
            capacities = tuple((hop, peaks_gb_per_s[hop] / alone_gb_per_s) for hop in hops)
            is_inside = self._routes.island_of[source] == self._routes.island_of[target]
            ports: tuple[SharedLink, ...] = ((source, "out"), ("into", target)) if is_inside else ()
            self._paths[pair] = _Path((*ports, *hops), capacities, ports)
        return self._paths[pair]

    def _touch(self, flow: _Flow) -> None:
        """Have bandwidth reallocated for a flow that begins or ends, after all other events of this instant."""
        if not self._touched_links:
            self._clock.after(0.0, self._reallocate)
        self._touched_links.update(dict.fromkeys(flow.shared))
        self._mark_changed((flow.segment.source, flow.segment.target))

    def _reallocate(self) -> None:
        """Reallocate bandwidth to the flows of the ports and links that were touched."""
        links, self._touched_links = self._touched_links, {}
        flows: dict[_Flow, None] = {}
        for link in links:
            flows.update(self._flows[link])
        ranks: set[int] = set()
        for flow in flows:
            speed = self._speed(flow)
            if speed != flow.speed:
                self._set_speed(flow, speed)
                ranks |= {flow.segment.source, flow.segment.target}
        self._mark_changed(ranks)

    def _speed(self, flow: _Flow) -> float:
        """Return a flow's speed: the least of its shares of its ports and links."""
        flows, ports = self._flows, flow.path.ports
        sharers = max(len(flows[ports[0]]), len(flows[ports[1]])) if ports else 1
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

    def _mark_changed(self, ranks: Collection[int]) -> None:
        """Schedule a report of the loads of some ranks, after all other events of this instant."""
        if ranks and not self._changed_ranks:
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
        for rank in (flow.segment.source, flow.segment.target) if flow.path.ports else ():
            del self._of_rank[rank][flow]
        self._touch(flow)
        flow.on_end()


# A lower bound of a call's time from its links: no port or link passes bytes faster than its rate.
#
# The simulation shares ports among copy engines only, and bounds one kernel by its SMs. It does not know that a kernel
# and a copy engine, or several kernels, share a link: this bound does.


LinkMove = tuple[int, int, Region]  # from which rank, to which, and what


def links_bound_us(busiest: tuple[float, set[str]], timeline: Timeline) -> float:
    """Return the earliest end of the last byte on the busiest port or link, counted from the first move's begin.

    busiest: of the plan, as `busiest_link` returns it.
    """
    busiest_us, moving = busiest
    if not moving:
        return 0.0
    return busiest_us + min(span.begin_us for span in timeline.spans if span.name in moving)


def busiest_link(plan: Plan, machine: Machine) -> tuple[float, set[str]]:
    """Return the busy time of the busiest port or link, and the names of the operations that move bytes."""
    links, routes = machine.links, machine.routes
    pushed = max(rate for _, rate in links.sm_push.points)
    peaks = {
        COPY_ENGINE: machine.engines_gb_per_s,
        COPY_KERNEL: pushed,
        TILE_KERNEL: pushed,
        REDUCE_KERNEL: max(rate for _, rate in links.sm_pull.points),
    }
    engine_of = {queue.name: plan.realization.engine_of(queue.name) for queue in plan.schedule.queues}
    item_bytes = {buffer.name: ITEMSIZE_BYTES[plan.dtype_of(buffer.name)] for buffer in plan.schedule.buffers}
    busy_us: defaultdict[tuple[Endpoint, Endpoint], float] = defaultdict(float)
    moving: set[str] = set()
    for operation in plan.schedule.operations:
        rate = peaks.get(engine_of[operation.queue])
        for source, target, region in _link_moves(operation) if rate else ():
            rows, cols = region.shape
            kilobytes = rows * cols * item_bytes[region.buffer] / 1e3
            busy_us[source, "out"] += kilobytes / rate if rate else 0.0
            busy_us["into", target] += kilobytes / rate if rate else 0.0
            for hop in routes.between(source, target):
                busy_us[hop] += kilobytes / routes.peaks_gb_per_s[hop]
            moving.add(operation.name)
    return max(busy_us.values(), default=0.0), moving


def _link_moves(operation: Operation) -> list[LinkMove]:
    """Return the regions that an operation moves over links; none for other operations."""
    if isinstance(operation, Put | Get):
        pairs = zip(operation.sources, operation.destinations, strict=True)
        moves = [(source.rank, target.rank, source) for source, target in pairs]
    elif isinstance(operation, Compute):
        moves = [(operation.rank, place.rank, place) for place in operation.writes]
    elif isinstance(operation, Reduce):
        moves = [(operand.rank, operation.rank, operand) for operand in operation.operands]
    else:
        moves = []
    return [(source, target, region) for source, target, region in moves if source != target and not region.is_empty]
