"""Which queues of a plan run on the caller's stream, which have one of their own, and what those wait for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
from overweave.ir.schedule import Apply, Compute, Copy, Operation, Put, Wait

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


# Which waits precede the launch of a kernel on a side stream, and what such a launch requires.


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


# The waits of a plan that no kernel makes: only a stream waits (cuStreamWaitValue), and no deadline ends it.


Signal = tuple[str, int]  # pad and number, on the rank that waits


def waits_without_deadline(plan: Plan, rank: int) -> tuple[Wait, ...]:
    """Return the waits of side streams for peers' signals whose arrival no kernel of this rank implies."""
    stream_queues = streams_that_wait(plan)
    operations = list(plan.schedule.of_rank(rank))
    notified_here = {signal for operation in operations for signal in _notified(operation, rank)}
    arrived = _signals_behind_kernels(plan, rank, stream_queues)
    waits = (
        wait
        for operation in operations
        if operation.queue in stream_queues
        for wait in operation.all_waits
        if not set(_awaited((wait,))) <= arrived | notified_here
    )
    return tuple(dict.fromkeys(waits))


def streams_that_wait(plan: Plan) -> frozenset[str]:
    """Return the queues of side streams that run no kernel of ours: the stream itself waits for signals."""
    engines = {one.queue: one.engine for one in plan.realization.engines}
    return frozenset(name for name in queues_beside(plan) if engines[name] in (COPY_ENGINE, LIBRARY))


def _signals_behind_kernels(plan: Plan, rank: int, stream_queues: frozenset[str]) -> set[Signal]:
    """Return the signals that have arrived at a rank once all that its kernels wait for has arrived.

    stream_queues: queues whose streams wait by themselves. Their operations complete in order: a signal of one implies
    the signals and the waits of all before it.
    """
    in_order: dict[tuple[int, str], list[Operation]] = {}  # (rank, queue) -> its operations
    for operation in plan.schedule.operations:
        if operation.queue in stream_queues:
            in_order.setdefault((operation.rank, operation.queue), []).append(operation)
    senders = {
        signal: (queue, index)
        for queue, operations in in_order.items()
        for index, operation in enumerate(operations)
        for signal in _notified(operation, rank)
    }
    pending = [
        signal
        for operation in plan.schedule.of_rank(rank)
        if operation.queue not in stream_queues
        for signal in _awaited(operation.all_waits)
    ]
    arrived: set[Signal] = set()
    done: dict[tuple[int, str], int] = {}  # (rank, queue) -> how many of its operations were followed
    while pending:
        signal = pending.pop()
        arrived.add(signal)
        queue, index = senders.get(signal, ((rank, ""), -1))
        for operation in in_order.get(queue, [])[done.get(queue, 0) : index + 1]:
            pending += _notified(operation, rank)
            pending += _awaited(operation.all_waits) if operation.rank == rank else ()
        done[queue] = max(done.get(queue, 0), index + 1)
    return arrived


def _notified(operation: Operation, rank: int) -> Iterator[Signal]:
    return ((notify.pad, notify.signal) for notify in operation.notifies if notify.rank == rank)


def _awaited(waits: Iterable[Wait]) -> Iterator[Signal]:
    return ((wait.pad, signal) for wait in waits for signal in range(*wait.signals))
