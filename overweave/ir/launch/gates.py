"""Which waits precede the launch of a kernel on a side stream, and what such a launch requires."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import COPY_ENGINE, COPY_KERNEL, LIBRARY, Plan
from overweave.ir.schedule import Apply, Compute, Copy, Operation, Put, Wait


def first_own_waits(operations: Sequence[Operation], queue: str) -> tuple[Wait, ...]:
    """Return the waits for results of the same rank, of the first operation in the queue that has any.

    operations: those of one rank. The host launches the queue's kernel behind these waits. So blocks of the kernel that
    computes the results are resident by then, and spinning blocks of this kernel cannot take their SMs.
    """
    results = (one for one in operations if isinstance(one, Compute | Apply))
    notified = {(note.pad, note.signal) for one in results for note in one.notifies if note.rank == one.rank}
    waits = (
        tuple(wait for wait in one.waits if (wait.pad, wait.signals[0]) in notified)
        for one in operations
        if one.queue == queue
    )
    return next(filter(None, waits), ())


def waits_for_nothing(operations: Iterable[Operation]) -> bool:
    """Whether no Put waits, and all else is Copies, which only wait at the end."""
    return all(isinstance(one, Copy) or (isinstance(one, Put) and not one.waits) for one in operations)


def kernels_on_own_streams(plan: Plan) -> tuple[str, ...]:
    """Return the queues whose kernels run on side streams."""
    own_streams, engines = queues_beside(plan), plan.realization.engine_by_queue
    return tuple(queue for queue in sorted(own_streams) if engines[queue] not in (COPY_ENGINE, LIBRARY))


def launch_obstacle(plan: Plan, rank_operations: Sequence[Operation], queue: str) -> str:
    """Return why a kernel of `kernels_on_own_streams` cannot be launched; "" if it can.

    rank_operations: those of one rank. The kernel may start at any time after the waits of `first_own_waits`. So there
    must be such a wait, unless it waits for nothing, or the tile kernel leaves SMs to it.
    """
    operations = tuple(one for one in rank_operations if one.queue == queue)
    has_sms = plan.realization.engine_of(queue) == COPY_KERNEL and plan.sms_for_pushes > 0
    if not operations or has_sms or waits_for_nothing(operations) or first_own_waits(rank_operations, queue):
        return ""
    return f"{operations[0].name} waits for no result of its own rank: it could take the SMs that those need"
