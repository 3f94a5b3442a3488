"""In which order one rank's host launches a plan: producers before those that wait for them."""

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
    """The launches of a rank, in order. A kernel stands where its first tile does, a copy behind its own producers.

    A stream wait that is enqueued ahead of what satisfies it can block the hardware queue they share (it depends on
    CUDA_DEVICE_MAX_CONNECTIONS), so a copy that waits for own results follows their launch, and so does what is
    queued behind it; the same holds for library calls on a stream of their own. Copies that nothing comes between are
    one launch.
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
    operations: list[Operation], engines: dict[str, Engine], beside: frozenset[str]
) -> list[tuple[int, int]]:
    """Where each operation is launched: (position, 1 if behind what is launched there)."""
    first_of_queue: dict[str, int] = {}
    producers: dict[tuple[str, int], int] = {}
    for position, operation in enumerate(operations):
        first = first_of_queue.setdefault(operation.queue, position)
        launched = position if engines[operation.queue] in (LIBRARY, COPY_ENGINE) else first
        for notify in operation.notifies:
            if notify.rank == operation.rank:
                key = (notify.pad, notify.signal)
                producers[key] = max(producers.get(key, -1), launched)
    positions: list[tuple[int, int]] = []
    behind: dict[str, tuple[int, int]] = {}
    for position, operation in enumerate(operations):
        is_kernel = engines[operation.queue] not in (LIBRARY, COPY_ENGINE)
        if is_kernel or operation.queue not in beside:
            positions.append((first_of_queue[operation.queue] if is_kernel else position, 0))
            continue
        waited = [(wait.pad, signal) for wait in operation.all_waits for signal in range(*wait.signals)]
        produced = max((producers.get(key, -1) for key in waited), default=-1)
        own = (position, 0) if produced < position else (produced, 1)
        behind[operation.queue] = max(behind.get(operation.queue, (-1, 0)), own)
        positions.append(behind[operation.queue])
    return positions
