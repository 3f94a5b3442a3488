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
    """The SMs that a library call may take: those that tiles leave to what runs beside them; 0: any."""
    return plan.realization.library_sms if operation.queue in queues_beside(plan) else 0


def queues_beside(plan: Plan) -> frozenset[str]:
    """The queues with a stream of their own: a copy engine's; a reduction's or a copy kernel's that no kernel boundary
    precedes; a library's that the caller's stream does not order, as it orders what is after one another.

    The caller's stream is that of the kernel that computes tiles or packs messages, else of the first library queue.
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
