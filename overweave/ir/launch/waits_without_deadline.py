"""The waits of a plan that no kernel makes: only a stream waits (cuStreamWaitValue), and no deadline ends it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import COPY_ENGINE, LIBRARY, Plan
from overweave.ir.schedule import Operation, Wait

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
