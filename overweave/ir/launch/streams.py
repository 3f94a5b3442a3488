"""Which queues of a plan run on the caller's stream, one launch after the other, and which have one of their own."""

from __future__ import annotations

from overweave.ir.plan import (
    AUTHOR_KERNEL,
    COPY_ENGINE,
    COPY_KERNEL,
    LIBRARY,
    PACKED_KERNEL,
    REDUCE_KERNEL,
    TILE_KERNEL,
    Plan,
)
from overweave.ir.schedule import Operation

_MAIN_KERNELS = (TILE_KERNEL, AUTHOR_KERNEL, PACKED_KERNEL)


def most_sms(plan: Plan, operation: Operation) -> int:
    """Return how many SMs a library call (NCCL, cuBLAS) may take: those that tiles leave free; 0: no limit."""
    return plan.realization.library_sms if operation.queue in queues_beside(plan) else 0


def queues_beside(plan: Plan) -> frozenset[str]:
    """Return the queues that run on side streams.

    These are those of the copy engine, those of reduction and copy kernels without `after`, and library queues that
    are neither after another queue nor before one on the caller's stream. The caller's stream runs the kernel that
    computes tiles or packs messages; if there is none, the first library queue.
    """
    engines = {one.queue: one.engine for one in plan.realization.engines}
    after = {queue.name: queue.after for queue in plan.schedule.queues}
    by_library = [name for name in after if engines.get(name) == LIBRARY]
    callers = [name for name in after if engines.get(name) in _MAIN_KERNELS] or by_library[:1]
    ordered = {*callers, *(before for name in callers for before in after[name])}
    return frozenset(
        name
        for name in after
        if engines.get(name) == COPY_ENGINE
        or (engines.get(name) in (REDUCE_KERNEL, COPY_KERNEL) and not after[name])
        or (engines.get(name) == LIBRARY and not after[name] and name not in ordered)
    )
