"""Two schedules that a reader can hold in mind, and how to change them: tests provoke one fault at a time."""

from __future__ import annotations

from msgspec.structs import replace

from overweave.ir.schedule import (
    Buffer,
    Compute,
    Copy,
    Credit,
    Goal,
    InitialContents,
    Notify,
    Put,
    Queue,
    Reduce,
    Region,
    Schedule,
    SignalPad,
    Wait,
)

RANKS = (0, 1)


def whole(buffer: str, rank: int, rows=(0, 2)) -> Region:
    return Region(buffer, rank, rows, (0, 4))


def put(rank: int, /, **changes) -> Put:
    """Pushes the own `x` into the peer's `slot` and says so."""
    made = Put(
        name=f"put.{rank}",
        rank=rank,
        queue="copies",
        notifies=(Notify("arrived", 1 - rank, 0),),
        sources=(whole("x", rank),),
        destinations=(whole("slot", 1 - rank),),
    )
    return replace(made, **changes)


def take(rank: int, /, **changes) -> Copy:
    """Waits for the peer's `x` and hands it to the caller."""
    made = Copy(
        name=f"take.{rank}",
        rank=rank,
        queue="main",
        waits=(Wait("arrived", (0, 1), 1),),
        sources=(whole("slot", rank),),
        destinations=(whole("y", rank),),
    )
    return replace(made, **changes)


def exchange(*operations, **changes) -> Schedule:
    """Two ranks swap their inputs. operations: in place of the usual put and take of both."""
    made = Schedule(
        name="exchange",
        world_size=2,
        buffers=(Buffer("x", 2, 4, "input"), Buffer("slot", 2, 4, "symmetric"), Buffer("y", 2, 4, "output")),
        pads=(SignalPad("arrived", 2),),
        queues=(Queue("copies", "complete"), Queue("main", "complete")),
        credits=(Credit(0, 1), Credit(1, 0)),
        given=tuple(InitialContents(whole("x", rank), "a", 2 * rank, 0) for rank in RANKS),
        goal=tuple(Goal(whole("y", rank), "a", 2 * (1 - rank), 0) for rank in RANKS),
        operations=operations or (put(0), put(1), take(0), take(1)),
    )
    return replace(made, **changes)


def total(rank: int, /, **changes) -> Reduce:
    """Adds both partials, rank 0's first."""
    operands = (whole("slot", 1), whole("part", 1)) if rank else (whole("part", 0), whole("slot", 0))
    made = Reduce(
        name=f"total.{rank}",
        rank=rank,
        queue="main",
        waits=(Wait("arrived", (0, 1), 1),),
        operands=operands,
        out=whole("y", rank),
    )
    return replace(made, **changes)


def sums(**changes) -> Schedule:
    """Each rank computes its part of a product (k = 4 of 8), pushes it to the peer, and sums both in rank order."""
    operations = []
    for rank in RANKS:
        operations += [
            Compute(
                name=f"multiply.{rank}",
                rank=rank,
                queue="main",
                notifies=(Notify("computed", rank, 0),),
                a=(whole("x", rank),),
                b=whole("w", rank, (0, 4)),
                out=(whole("part", rank),),
                tiles=3,
            ),
            put(rank, waits=(Wait("computed", (0, 1), 3),), sources=(whole("part", rank),)),
            total(rank),
        ]
    made = exchange(
        *operations,
        buffers=(
            Buffer("x", 2, 4, "input"),
            Buffer("w", 4, 4, "input"),
            Buffer("part", 2, 4, "local"),
            Buffer("slot", 2, 4, "symmetric"),
            Buffer("y", 2, 4, "output"),
        ),
        pads=(SignalPad("arrived", 2), SignalPad("computed", 1)),
        given=tuple(
            given
            for rank in RANKS
            for given in (
                InitialContents(whole("x", rank), "a", 0, 4 * rank),
                InitialContents(whole("w", rank, (0, 4)), "b", 4 * rank, 0),
            )
        ),
        goal=tuple(Goal(whole("y", rank), "a@b", 0, 0, ((0, 4), (4, 8))) for rank in RANKS),
    )
    return replace(made, **changes)


def altered(schedule: Schedule, **operations) -> Schedule:
    """The schedule with operations replaced by name (dots as underscores); None drops one."""
    named = {name.replace("_", "."): operation for name, operation in operations.items()}
    kept = tuple(named.get(operation.name, operation) for operation in schedule.operations)
    return replace(schedule, operations=tuple(operation for operation in kept if operation is not None))
