"""What the links alone take: no port or link passes more bytes at once than its rate, whoever moves them.

The run lets copy engines share ports among themselves, and kernels reach what so many SMs do; of a kernel's bytes
beside a copy engine's, or of several launches' at once, it knows nothing.
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


def floor_us(plan: Plan, machine: Machine, timeline: Timeline) -> float:
    """When the busiest port or link has passed all its bytes, one move after the other, since the first one began."""
    busiest_us, moving = busiest(plan, machine)
    if not moving:
        return 0.0
    return busiest_us + min(span.begin_us for span in timeline.spans if span.name in moving)


def busiest(plan: Plan, machine: Machine) -> tuple[float, set[str]]:
    """How long the busiest port or link passes bytes, whatever the order, and the names of what moves them."""
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
        for source, target, region in _moves(operation) if rate else ():
            rows, cols = region.shape
            kilobytes = rows * cols * item_bytes[region.buffer] / 1e3
            busy_us[source, "out"] += kilobytes / rate if rate else 0.0
            busy_us["into", target] += kilobytes / rate if rate else 0.0
            for hop in routes.between(source, target):
                busy_us[hop] += kilobytes / routes.curves[hop].peak_gb_per_s
            moving.add(operation.name)
    return max(busy_us.values(), default=0.0), moving


def no_sooner_us(plan: Plan, machine: Machine, timeline: Timeline) -> float:
    """When the call ends: with what was simulated, or with the last bytes that the links pass."""
    return max(timeline.total_us, floor_us(plan, machine, timeline))


def _moves(operation: Operation) -> list[LinkMove]:
    """What an operation takes over a link."""
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
