"""What stands around the operations of a woven schedule: outputs, queues, credits and full counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.footprint import Operand, TileSpace
from overweave.ir.schedule import Apply, Buffer, Compute, Credit, Goal, Operation, Queue, Region, SignalPad, Wait
from overweave.schedules.communication import ISSUE, MAIN, PACKED, TILES


def check_stores(space: TileSpace) -> None:
    """Raises ScheduleError where tiles would write the same element."""
    for store in space.stores:
        cut = {dim.axis for dim in store.dims}
        for axis in space.grid:
            if axis.count > 1 and axis.name not in cut:
                found = f"its {axis.count} tiles along {axis.name} all write {store.tensor}"
                raise ScheduleError(
                    f"weave {space.kernel}", found, f"Give {store.tensor} a dimension along {axis.name}"
                )


def output(store: Operand) -> Buffer:
    return Buffer(store.tensor, store.rows, store.cols, "output")


def goals(stores: Iterable[Operand], world_size: int) -> tuple[Goal, ...]:
    """What is not exchanged is the kernel's result on every rank, all of it."""
    return tuple(
        Goal(Region(store.tensor, rank, (0, store.rows), (0, store.cols)), store.tensor, 0, 0)
        for store in stores
        for rank in range(world_size)
    )


def queues(given: Iterable[Queue], operations: Iterable[Operation]) -> tuple[Queue, ...]:
    """The tiles' queue and those that are in use. All work of the caller's stream runs in launch order, kernels too."""
    used = {operation.queue for operation in operations}
    known = {queue.name: queue for queue in given}
    if MAIN in used:
        main = known.get(MAIN, Queue(MAIN, "complete"))
        known[MAIN] = replace(main, after=tuple(dict.fromkeys((TILES, *main.after))))
    tiles = Queue(TILES, ISSUE, after=(MAIN, PACKED))
    found = {TILES: tiles} | {name: queue for name, queue in known.items() if name in used}
    return tuple(
        replace(queue, after=tuple(name for name in queue.after if name in found and name != queue.name))
        for queue in found.values()
    )


def credits(
    world_size: int, buffers: Iterable[Buffer], pads: Iterable[SignalPad], only: Sequence[int] = ()
) -> tuple[Credit, ...]:
    """Between every two ranks, or every two of some, if peers touch the workspace at all."""
    is_shared = any(True for _ in pads) or any(buffer.home == "symmetric" for buffer in buffers)
    ranks = only or range(world_size) if is_shared else ()
    return tuple(Credit(giver, taker) for giver in ranks for taker in ranks if giver != taker)


def counted(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Waits for what tiles announce, raised from one to the number of those tiles."""
    tiles: Counter[tuple[str, int, int]] = Counter()
    for operation in operations:
        for notify in operation.notifies:
            tiles[notify.pad, notify.rank, notify.signal] += operation.instances
    return tuple(_raised(operation, tiles) for operation in operations)


def _raised(operation: Operation, tiles: Counter[tuple[str, int, int]]) -> Operation:
    def raised(waits: Iterable[Wait]) -> tuple[Wait, ...]:
        """Signals of one wait may count differently: those that do not are a wait of their own."""
        made: list[Wait] = []
        for wait in waits:
            counts = [
                (signal, tiles.get((wait.pad, operation.rank, signal), wait.count)) for signal in range(*wait.signals)
            ]
            for count, together in groupby(counts, key=lambda pair: pair[1]):
                signals = [signal for signal, _ in together]
                made.append(Wait(wait.pad, (signals[0], signals[-1] + 1), count))
        return tuple(made)

    if not operation.all_waits:
        return operation
    counted = replace(operation, waits=raised(operation.waits))
    if isinstance(counted, Apply | Compute):
        return replace(counted, late_waits=raised(counted.late_waits))
    return counted
