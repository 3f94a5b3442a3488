"""What holds a kernel on a stream of its own back until it may be launched, and what its launch requires."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import COPY_ENGINE, COPY_KERNEL, LIBRARY, Plan
from overweave.ir.schedule import Apply, Compute, Copy, Operation, Put, Wait


def first_own_waits(own: Sequence[Operation], queue: str) -> tuple[Wait, ...]:
    """The waits for results of the rank itself that the first operation of a queue with such waits has.

    own: the operations of a rank. A kernel of the queue is launched behind these waits: then blocks of the kernel that
    computes are running, and blocks of this one that wait cannot keep them from it.
    """
    results = (one for one in own if isinstance(one, Compute | Apply))
    announced = {(note.pad, note.signal) for one in results for note in one.notifies if note.rank == one.rank}
    waits = (
        tuple(wait for wait in one.waits if (wait.pad, wait.signals[0]) in announced)
        for one in own
        if one.queue == queue
    )
    return next(filter(None, waits), ())


def waits_for_nothing(operations: Iterable[Operation]) -> bool:
    """Whether all operations are Puts that may start at once, but for what only waits, at the end."""
    return all(isinstance(one, Copy) or (isinstance(one, Put) and not one.waits) for one in operations)


def gated(plan: Plan) -> tuple[str, ...]:
    """The queues of kernels on streams of their own."""
    beside, engines = queues_beside(plan), plan.realization.engine_by_queue
    return tuple(queue for queue in sorted(beside) if engines[queue] not in (COPY_ENGINE, LIBRARY))


def launch_obstacle(plan: Plan, own: Sequence[Operation], queue: str) -> str:
    """Why a kernel on a stream of its own, of one of the queues `gated`, cannot be launched; empty if it can.

    own: the operations of a rank. It may start at any time behind what holds it back: so something must, unless it
    waits for nothing, or has SMs that the tile kernel leaves to it.
    """
    operations = tuple(one for one in own if one.queue == queue)
    has_sms = plan.realization.engine_of(queue) == COPY_KERNEL and plan.sms_for_pushes > 0
    if not operations or has_sms or waits_for_nothing(operations) or first_own_waits(own, queue):
        return ""
    return f"{operations[0].name} waits for no result of its own rank: it could take the SMs that those need"
