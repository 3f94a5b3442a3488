"""What the links alone take: no port passes more bytes at once than its rate, whoever moves them.

The run lets copy engines share ports among themselves, and kernels reach what so many SMs do; of a kernel's bytes
beside a copy engine's, or of several launches' at once, it knows nothing.
"""

from __future__ import annotations

from collections import defaultdict

from overweave.hardware.machine import Links
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import COPY_ENGINE, COPY_KERNEL, REDUCE_KERNEL, TILE_KERNEL, Plan
from overweave.ir.schedule import Compute, Get, Operation, Put, Reduce, Region
from overweave.ir.timeline.timeline import Timeline

Move = tuple[int, int, Region]  # from which rank, to which, and what


def floor_us(plan: Plan, links: Links, timeline: Timeline) -> float:
    """When the busiest port has passed all its bytes, one move after the other, from when the first one began."""
    pushed = max(rate for _, rate in links.sm_push.points)
    peaks = {
        COPY_ENGINE: links.push.peak_gb_per_s,
        COPY_KERNEL: pushed,
        TILE_KERNEL: pushed,
        REDUCE_KERNEL: max(rate for _, rate in links.sm_pull.points),
    }
    busy_us: defaultdict[tuple[int, str], float] = defaultdict(float)
    moving: set[str] = set()
    for operation in plan.schedule.operations:
        rate = peaks.get(plan.realization.engine_of(operation.queue))
        for source, target, region in _moves(operation) if rate else ():
            elements = region.shape[0] * region.shape[1]
            us = elements * ITEMSIZE_BYTES[plan.dtype_of(region.buffer)] / rate / 1e3 if rate else 0.0
            busy_us[source, "out"] += us
            busy_us[target, "in"] += us
            moving.add(operation.name)
    if not moving:
        return 0.0
    return max(busy_us.values()) + min(span.begin_us for span in timeline.spans if span.name in moving)


def no_sooner_us(plan: Plan, links: Links, timeline: Timeline) -> float:
    """When the call ends: with what was simulated, or with the last bytes that the links pass."""
    return max(timeline.total_us, floor_us(plan, links, timeline))


def _moves(operation: Operation) -> list[Move]:
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
