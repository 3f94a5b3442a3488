"""How the host of each rank launches a plan, in words of this folder: streams, their order, what holds a launch back.

`ir/launch` says the same to the GPU runtime and to the proof. The model that judges both has it from here, so that a
mistake there shows as a difference; `tests/campaigns/oracle/test_gpu_model.py` holds one against the other.
SOURCE: docs/design/0002-device-protocol.md, a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

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

CALLERS = ""
TILES = (TILE_KERNEL, AUTHOR_KERNEL)


class Launch(Struct, frozen=True):
    """Operations that one launch, or one stretch of a copy engine's stream, runs.

    stream: CALLERS, or the queue's own. gate: what the stream waits for before a kernel. behind: queues with streams of
    their own whose earlier launches must have ended. pushes_first: whether the kernel of pushes must have its SMs.
    """

    engine: str
    queue: str
    stream: str
    operations: tuple[Operation, ...]
    gate: tuple[Wait, ...] = ()
    behind: tuple[str, ...] = ()
    pushes_first: bool = False

    @property
    def is_kernel(self) -> bool:
        return self.engine not in (COPY_ENGINE, LIBRARY)


def own_streams(plan: Plan) -> frozenset[str]:
    """The queues that do not run on the caller's stream."""
    engines = {one.queue: one.engine for one in plan.realization.engines}
    callers = [one for one in plan.schedule.queues if engines[one.name] in (*TILES, PACKED_KERNEL)]
    callers = callers or [one for one in plan.schedule.queues if engines[one.name] == LIBRARY][:1]
    joined = {one.name for one in callers} | {name for one in callers for name in one.after}
    found = set()
    for queue in plan.schedule.queues:
        engine = engines[queue.name]
        free = not queue.after
        if engine == COPY_ENGINE or (free and engine in (REDUCE_KERNEL, COPY_KERNEL)):
            found.add(queue.name)
        if free and engine == LIBRARY and queue.name not in joined:
            found.add(queue.name)
    return frozenset(found)


def launches(plan: Plan, rank: int) -> tuple[Launch, ...]:
    """What a rank launches, in the order of its host."""
    engines = {one.queue: one.engine for one in plan.realization.engines}
    own = [one for one in plan.schedule.operations if one.rank == rank]
    aside = own_streams(plan)
    found: list[Launch] = []
    for queue, operations in _together(own, engines, aside):
        engine, is_aside = engines[queue], queue in aside
        is_kernel = engine not in (COPY_ENGINE, LIBRARY)
        pushes = [one for one in own if engines[one.queue] == COPY_KERNEL and one.queue in aside]
        found.append(
            Launch(
                engine=engine,
                queue=queue,
                stream=queue if is_aside else CALLERS,
                operations=operations,
                gate=gate_of(own, queue) if is_kernel and is_aside else (),
                behind=() if is_aside else tuple(name for name in _after(plan, queue) if name in aside),
                pushes_first=engine in TILES and bool(pushes) and _start_at_once(pushes),
            )
        )
    return tuple(found)


def gate_of(own: list[Operation], queue: str) -> tuple[Wait, ...]:
    """The waits for own results of the first operation of the queue that has such waits."""
    results = {
        (one.pad, one.signal)
        for operation in own
        if isinstance(operation, Compute | Apply)
        for one in operation.notifies
        if one.rank == operation.rank
    }
    for operation in own:
        if operation.queue == queue:
            gate = tuple(wait for wait in operation.waits if (wait.pad, wait.signals[0]) in results)
            if gate:
                return gate
    return ()


def _start_at_once(pushes: Iterable[Operation]) -> bool:
    """Whether no push waits. What only waits stands at the end of their queue."""
    return all(isinstance(one, Copy) or (isinstance(one, Put) and not one.waits) for one in pushes)


def _after(plan: Plan, queue: str) -> tuple[str, ...]:
    return next(one.after for one in plan.schedule.queues if one.name == queue)


def _together(
    own: list[Operation], engines: Mapping[str, str], aside: frozenset[str]
) -> list[tuple[str, tuple[Operation, ...]]]:
    """Operations by launch. A kernel stands where its first operation does. What a stream of its own waits for must be
    launched before, where this rank makes it: the hardware queue that they share could block otherwise."""
    place_of: dict[str, int] = {}  # of each kernel
    makers: dict[tuple[str, int], int] = {}  # by own signal, where its last maker is launched
    at: list[int] = []
    for index, one in enumerate(own):
        is_kernel = engines[one.queue] not in (COPY_ENGINE, LIBRARY)
        at.append(place_of.setdefault(one.queue, index) if is_kernel else index)
        for notify in one.notifies:
            if notify.rank == one.rank:
                key = notify.pad, notify.signal
                makers[key] = max(at[index], makers.get(key, at[index]))
    places: list[tuple[int, int, int]] = []  # where launched, whether behind what is launched there, the operation
    last: dict[str, tuple[int, int]] = {}
    for index, one in enumerate(own):
        place = (at[index], 0)
        if one.queue in aside and engines[one.queue] in (COPY_ENGINE, LIBRARY):
            awaited = ((wait.pad, signal) for wait in one.all_waits for signal in range(*wait.signals))
            made = max((makers.get(key, -1) for key in awaited), default=-1)
            place = max(last.get(one.queue, (-1, 0)), (made, 1) if made >= index else (index, 0))
            last[one.queue] = place
        places.append((*place, index))
    grouped: list[tuple[str, tuple[Operation, ...]]] = []
    for _, _, index in sorted(places):
        one = own[index]
        if grouped and grouped[-1][0] == one.queue and engines[one.queue] != LIBRARY:
            grouped[-1] = one.queue, (*grouped[-1][1], one)
        else:
            grouped.append((one.queue, (one,)))
    return grouped
