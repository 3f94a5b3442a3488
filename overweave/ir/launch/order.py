"""The order in which one rank's host launches a plan: producers before the operations that wait for them."""

from __future__ import annotations

from msgspec import Struct

from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import COPY_ENGINE, LIBRARY, Engine, Plan
from overweave.ir.schedule import Operation


class QueueLaunch(Struct, frozen=True):
    """One launch: operations of one queue that are enqueued together. A kernel's are all of its queue."""

    engine: Engine
    queue: str
    operations: tuple[Operation, ...]


def launch_order(plan: Plan, rank: int) -> tuple[QueueLaunch, ...]:
    """Return the launches of a rank, in order. A kernel is launched at the position of its first tile.

    A stream wait that is enqueued ahead of the launch that satisfies it can block the hardware queue that both share
    (it depends on CUDA_DEVICE_MAX_CONNECTIONS). So a copy that waits for results of its own rank follows their launch,
    and everything queued behind the copy does too. The same holds for library calls on a side stream. Consecutive
    copies are one launch.
    """
    operations = list(plan.schedule.of_rank(rank))
    engines = {queue.name: plan.realization.engine_of(queue.name) for queue in plan.schedule.queues}
    launched_at = _launch_positions(operations, engines, queues_beside(plan))
    ordered = sorted(zip(launched_at, range(len(operations)), strict=True))
    actions: list[QueueLaunch] = []
    for _, index in ordered:
        operation = operations[index]
        engine, previous = engines[operation.queue], actions[-1] if actions else None
        is_joined = previous is not None and previous.queue == operation.queue and engine != LIBRARY
        joined = previous.operations if previous is not None and is_joined else ()
        if is_joined:
            actions.pop()
        actions.append(QueueLaunch(engine, operation.queue, (*joined, operation)))
    return tuple(actions)


def _launch_positions(
    operations: list[Operation], engines: dict[str, Engine], own_streams: frozenset[str]
) -> list[tuple[int, int]]:
    """Return for each operation its place in launch order: (position, 1 if behind what is launched there else 0)."""
    first_of_queue: dict[str, int] = {}  # queue -> position of its first operation
    producers: dict[tuple[str, int], int] = {}  # (pad, signal) -> last position at which a notifier of it is launched
    for position, operation in enumerate(operations):
        first = first_of_queue.setdefault(operation.queue, position)
        launched = position if engines[operation.queue] in (LIBRARY, COPY_ENGINE) else first
        for notify in operation.notifies:
            if notify.rank == operation.rank:
                key = (notify.pad, notify.signal)
                producers[key] = max(producers.get(key, -1), launched)
    positions: list[tuple[int, int]] = []
    earliest: dict[str, tuple[int, int]] = {}  # side stream's queue -> place of its last operation so far
    for position, operation in enumerate(operations):
        is_kernel = engines[operation.queue] not in (LIBRARY, COPY_ENGINE)
        if is_kernel or operation.queue not in own_streams:
            positions.append((first_of_queue[operation.queue] if is_kernel else position, 0))
            continue
        waited = [(wait.pad, signal) for wait in operation.all_waits for signal in range(*wait.signals)]
        produced = max((producers.get(key, -1) for key in waited), default=-1)
        position_of_wait = (position, 0) if produced < position else (produced, 1)
        earliest[operation.queue] = max(earliest.get(operation.queue, (-1, 0)), position_of_wait)
        positions.append(earliest[operation.queue])
    return positions
