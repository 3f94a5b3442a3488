"""Passes: functions from a Schedule to a Schedule, each documented as before -> after in the text form.

A pass keeps what it does not name and proves nothing: verify what it returns. Golden files show each at work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.schedule import (
    LONGEST_DELAY_US,
    Apply,
    Compute,
    Copy,
    Get,
    Notify,
    Operation,
    Put,
    ReducePut,
    Region,
    Schedule,
    Wait,
)
from overweave.ir.shards import piece_rows

_Move = Put | Get | ReducePut


def split(schedule: Schedule, pieces: int, alignment: int = 1) -> Schedule:
    """Every chunk that moves between ranks moves as `pieces` chunks of rows, each with its own signal.

    before:  copies push.0-1: put x@0[0:64,0:8] -> gathered@1[0:64,0:8] signal arrived@1[0]
             tiles multiply.1-0: matmul ... wait arrived[0:1]>=1
    after:   copies push.0-1.p0: put x@0[0:32,0:8] -> gathered@1[0:32,0:8] signal arrived@1[0]
             copies push.0-1.p1: put x@0[32:64,0:8] -> gathered@1[32:64,0:8] signal arrived@1[1]
             tiles multiply.1-0: matmul ... wait arrived[0:2]>=1

    alignment: pieces begin at multiples of so many rows of their chunk. Whoever waited for a chunk waits for all of it.
    Raises InputError for less than one piece, and for a move whose sources and destinations do not lie side by side.
    """
    if pieces < 1 or alignment < 1:
        raise InputError(f"split into {pieces} pieces of {alignment} rows", "less than one", "Give at least one")
    moves = [operation for operation in schedule.operations if isinstance(operation, _Move)]
    pads = {notify.pad for move in moves for notify in move.notifies}
    operations: list[Operation] = []
    for operation in schedule.operations:
        waiting = replace(operation, waits=tuple(_widened(wait, pieces, pads) for wait in operation.waits))
        if isinstance(waiting, Apply | Compute):
            waiting = replace(waiting, late_waits=tuple(_widened(wait, pieces, pads) for wait in waiting.late_waits))
        if isinstance(waiting, _Move):
            operations += (_piece(waiting, piece, pieces, alignment) for piece in range(pieces))
        else:
            notifies = (part for notify in operation.notifies for part in _multiplied(notify, pieces, pads))
            operations.append(replace(waiting, notifies=tuple(notifies)))
    sizes = tuple(replace(pad, size=pad.size * pieces) if pad.name in pads else pad for pad in schedule.pads)
    return replace(schedule, pads=sizes, operations=tuple(operations))


def _widened(wait: Wait, pieces: int, pads: set[str]) -> Wait:
    lo, hi = wait.signals
    return replace(wait, signals=(lo * pieces, hi * pieces)) if wait.pad in pads else wait


def _multiplied(notify: Notify, pieces: int, pads: set[str]) -> list[Notify]:
    if notify.pad not in pads:
        return [notify]
    return [replace(notify, signal=notify.signal * pieces + piece) for piece in range(pieces)]


def _piece(move: _Move, piece: int, pieces: int, alignment: int) -> _Move:
    def part(region: Region) -> Region:
        return replace(region, rows=piece_rows(region.rows, pieces, alignment)[piece])

    shapes = [[region.shape for region in regions] for regions in (move.sources, move.destinations)]
    if shapes[0] != shapes[1]:
        raise InputError(f"split {move.name}", "its sources and destinations differ in shape", "Pair them one to one")
    return replace(
        move,
        name=f"{move.name}.p{piece}",
        notifies=tuple(replace(notify, signal=notify.signal * pieces + piece) for notify in move.notifies),
        sources=tuple(map(part, move.sources)),
        destinations=tuple(map(part, move.destinations)),
    )


def rotate(schedule: Schedule, queue: str, turns: int = 1) -> Schedule:
    """Rank r starts a queue r shares later: of n operations, r * turns * n / world_size move from front to back.

    before:  rank 1
               tiles multiply.1-0: ...
               tiles multiply.1-1: ...
    after:   rank 1
               tiles multiply.1-1: ...
               tiles multiply.1-0: ...

    So ranks that all began with shard 0 each begin with their own; turns=-1 takes a rotation back.
    Raises InputError for an unknown queue.
    """

    def rotated(operations: list[Operation]) -> list[Operation]:
        first = operations[0].rank * turns * len(operations) // schedule.world_size % len(operations)
        return operations[first:] + operations[:first]

    return _rearranged(schedule, queue, range(schedule.world_size), rotated)


def reorder(schedule: Schedule, rank: int, queue: str, names: Sequence[str]) -> Schedule:
    """One rank's operations of a queue run in the order of `names`, in the places they had together.

    before:  copies push.0-3.0: ...
             copies push.0-2.0: ...
    after:   copies push.0-2.0: ...        reorder(schedule, 0, "copies", ["push.0-2.0", "push.0-3.0"])
             copies push.0-3.0: ...

    Raises InputError for an unknown queue, and unless `names` names each of them once.
    """

    def reordered(operations: list[Operation]) -> list[Operation]:
        by_name = {operation.name: operation for operation in operations}
        if sorted(names) != sorted(operation.name for operation in operations) or len(by_name) != len(names):
            found = f"{len(names)} names for {len(operations)} operations, or other ones"
            raise InputError(f"reorder queue {queue} of rank {rank}", found, "Name each of its operations once")
        return [by_name[name] for name in names]

    return _rearranged(schedule, queue, (rank,), reordered)


def _rearranged(
    schedule: Schedule, queue: str, ranks: Iterable[int], order: Callable[[list[Operation]], list[Operation]]
) -> Schedule:
    """Deals each rank's operations of a queue, in a new order, to the launch places they held together."""
    if queue not in {known.name for known in schedule.queues}:
        known = ", ".join(known.name for known in schedule.queues)
        raise InputError(f"order queue {queue}", "unknown", f"Queues: {known}")
    operations = list(schedule.operations)
    for rank in ranks:
        places = [
            place for place, operation in enumerate(operations) if operation.rank == rank and operation.queue == queue
        ]
        if places:
            for place, operation in zip(places, order([operations[place] for place in places]), strict=True):
                operations[place] = operation
    return replace(schedule, operations=tuple(operations))


def inject_delay(schedule: Schedule, rank: int, before: str, delay_us: int) -> Schedule:
    """A rank rests before one of its operations: the fault that schedules must bear and races fear.

    before:  copies push.0-1.0: put ...
    after:   copies delay.push.0-1.0: copy delay_us=500
             copies push.0-1.0: put ...

    Raises InputError unless `before` names one operation of the rank, in a queue in which one waits for another's end.
    """
    asked = f"delay {before} of rank {rank}"
    places = [
        place
        for place, operation in enumerate(schedule.operations)
        if operation.rank == rank and operation.name == before
    ]
    if len(places) != 1:
        raise InputError(asked, f"the rank has {len(places)} operations of that name", "Name one")
    if not 0 <= delay_us <= LONGEST_DELAY_US:
        raise InputError(asked, f"{delay_us} us", f"Give 0 to {LONGEST_DELAY_US}")
    late = schedule.operations[places[0]]
    if any(queue.name == late.queue and queue.order == "issue" for queue in schedule.queues):
        raise InputError(asked, f"queue {late.queue} starts its operations at once", "Delay one that others wait for")
    rest = Copy(
        name=f"delay.{before}"[:64], rank=rank, queue=late.queue, sources=(), destinations=(), delay_us=delay_us
    )
    before_it, from_it = schedule.operations[: places[0]], schedule.operations[places[0] :]
    return replace(schedule, operations=(*before_it, rest, *from_it))
