"""What holds a kernel on a stream of its own back until it may be launched, and what its launch requires."""

from __future__ import annotations

from collections.abc import Iterable

from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import COPY_ENGINE, COPY_KERNEL, LIBRARY, Plan
from overweave.ir.schedule import Apply, Compute, Copy, Operation, Put, Wait


def first_own_waits(plan: Plan, rank: int, queue: str) -> tuple[Wait, ...]:
    """The waits for results of the rank itself that the first operation of a queue with such waits has.

    A kernel of the queue is launched behind them: then blocks of the kernel that computes are running, and blocks of
    this one that wait cannot keep them from it.
    """
    own = tuple(plan.schedule.of_rank(rank))
    results = (one for one in own if isinstance(one, Compute | Apply))
    announced = {(note.pad, note.signal) for one in results for note in one.notifies if note.rank == rank}
    waits = (
        tuple(wait for wait in one.waits if (wait.pad, wait.signals[0]) in announced)
        for one in own
        if one.queue == queue
    )
    return next(filter(None, waits), ())


def waits_for_nothing(operations: Iterable[Operation]) -> bool:
    """Whether all operations are Puts that may start at once, but for what only waits, at the end."""
    return all(isinstance(one, Copy) or (isinstance(one, Put) and not one.waits) for one in operations)


def gate_obstacle(plan: Plan, rank: int, queue: str) -> str:
    """Why a kernel on a stream of its own cannot be launched; empty if it can.

    It may start at any time behind what holds it back: so something must, unless it waits for nothing, or has SMs that
    the tile kernel leaves to it.
    """
    engine = plan.realization.engine_of(queue)
    operations = tuple(one for one in plan.schedule.of_rank(rank) if one.queue == queue)
    if engine in (COPY_ENGINE, LIBRARY) or queue not in queues_beside(plan) or not operations:
        return ""
    has_sms = engine == COPY_KERNEL and plan.sms_for_pushes > 0
    if has_sms or waits_for_nothing(operations) or first_own_waits(plan, rank, queue):
        return ""
    return f"{operations[0].name} waits for no result of its own rank: it could take the SMs that those need"
