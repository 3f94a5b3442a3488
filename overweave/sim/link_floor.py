"""A lower bound of a call's time from its links: no port or link passes bytes faster than its rate.

The simulation shares ports among copy engines only, and bounds one kernel by its SMs. It does not know that a kernel
and a copy engine, or several kernels, share a link: this bound does.
"""

from __future__ import annotations

from collections import defaultdict

from overweave.hardware.machine import Machine
from overweave.hardware.topology import Endpoint
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import COPY_ENGINE, COPY_KERNEL, REDUCE_KERNEL, TILE_KERNEL, Plan
from overweave.ir.schedule import Compute, Get, Operation, Put, Reduce, Region
from overweave.ir.timeline.timeline import Timeline

LinkMove = tuple[int, int, Region]  # from which rank, to which, and what


def links_bound_us(plan: Plan, machine: Machine, timeline: Timeline) -> float:
    """Return the earliest end of the last byte on the busiest port or link, counted from the first move's begin."""
    busiest_us, moving = busiest_link(plan, machine)
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
                busy_us[hop] += kilobytes / routes.curves[hop].peak_gb_per_s
            moving.add(operation.name)
    return max(busy_us.values(), default=0.0), moving


def bounded_total_us(plan: Plan, machine: Machine, timeline: Timeline) -> float:
    """Return the end of the call: the later of the simulated end and the links' lower bound."""
    return max(timeline.total_us, links_bound_us(plan, machine, timeline))


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
