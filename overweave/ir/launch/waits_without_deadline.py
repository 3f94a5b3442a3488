"""Which waits of a plan no kernel hears of: where a stream alone waits, nobody's deadline ends it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import COPY_ENGINE, LIBRARY, Plan
from overweave.ir.schedule import Operation, Wait

Signal = tuple[str, int]  # pad and number, on the rank that waits


def unheard(plan: Plan, rank: int) -> tuple[Wait, ...]:
    """What streams beside the caller's wait for, from peers, and no kernel of this rank hears of."""
    beside = streams_that_wait(plan)
    own = list(plan.schedule.of_rank(rank))
    made_here = {signal for operation in own for signal in _told(operation, rank)}
    heard = _heard(plan, rank, beside)
    missed = (
        wait
        for operation in own
        if operation.queue in beside
        for wait in operation.all_waits
        if not set(_awaited((wait,))) <= heard | made_here
    )
    return tuple(dict.fromkeys(missed))


def streams_that_wait(plan: Plan) -> frozenset[str]:
    """The queues whose streams wait for signals by themselves: those beside the caller's that run no kernel of ours."""
    engines = {one.queue: one.engine for one in plan.realization.engines}
    return frozenset(name for name in queues_beside(plan) if engines[name] in (COPY_ENGINE, LIBRARY))


def _heard(plan: Plan, rank: int, beside: frozenset[str]) -> set[Signal]:
    """The signals that have come when all kernels of a rank have had theirs.

    beside: queues whose streams wait by themselves. What one of them has done in order has come in order, and it has
    had what it waited for before.
    """
    in_order: dict[tuple[int, str], list[Operation]] = {}
    for operation in plan.schedule.operations:
        if operation.queue in beside:
            in_order.setdefault((operation.rank, operation.queue), []).append(operation)
    makers = {
        signal: (queue, at)
        for queue, operations in in_order.items()
        for at, operation in enumerate(operations)
        for signal in _told(operation, rank)
    }
    found = [
        signal
        for operation in plan.schedule.of_rank(rank)
        if operation.queue not in beside
        for signal in _awaited(operation.all_waits)
    ]
    heard: set[Signal] = set()
    done: dict[tuple[int, str], int] = {}
    while found:
        signal = found.pop()
        heard.add(signal)
        queue, at = makers.get(signal, ((rank, ""), -1))
        for operation in in_order.get(queue, [])[done.get(queue, 0) : at + 1]:
            found += _told(operation, rank)
            found += _awaited(operation.all_waits) if operation.rank == rank else ()
        done[queue] = max(done.get(queue, 0), at + 1)
    return heard


def _told(operation: Operation, rank: int) -> Iterator[Signal]:
    return ((notify.pad, notify.signal) for notify in operation.notifies if notify.rank == rank)


def _awaited(waits: Iterable[Wait]) -> Iterator[Signal]:
    return ((wait.pad, signal) for wait in waits for signal in range(*wait.signals))
