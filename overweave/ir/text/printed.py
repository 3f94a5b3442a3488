"""The text form of a Schedule: one operation per line, exact in both directions.

    schedule all_gather_matmul.push world_size=2 version=1
    buffer x [64, 32] input
    pad arrived [2]
    queue tiles issue after main
    credits 0 -> 1
    given x@0[0:64,0:32] = a[0,0]
    goal y@0[0:128,0:16] = a@b[0,0] sum 0:32
    rank 0
      copies push.0-1.0: put x@0[0:64,0:32] -> gathered@1[0:64,0:32] signal arrived@1[0]
      tiles multiply.0-1.0: matmul gathered@0[64:128,0:32] @ w@0[0:32,0:16] -> y@0[64:128,0:16] wait arrived[1:2]>=1

A buffer whose blocks are permuted says how large they are, and the place of each: `local blocks 64x32 at 2 0 1 3`.
Words stand apart by blanks. `rank` names the rank of the operations below it; operations stand in launch order.
`reuse echoes` stands where no credits are taken. `+->` accumulates. A matmul with addends is the sum it computes,
`p + a @ b + q -> out`, and `late` stands before what only they wait for; `scaled` stands before what the rows of its
product are multiplied by. What is added in any order says `order=any`, and so does the goal, `sum any 0:32 32:64`.
A sum that is given the epilogue says `then=finished`; what it becomes is called `a@b.finished`.
An `apply` says what each region holds, `REGION=TENSOR[ROW,COL]`. `ir.parse` reads it,
`ir.files` is the JSON form.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from overweave.ir.schedule import (
    CREDITS,
    Apply,
    Buffer,
    Collective,
    Compute,
    Copy,
    Given,
    Goal,
    Operation,
    Put,
    Reduce,
    ReducePut,
    Schedule,
)
from overweave.ir.text.parse import VERSION, from_text

__all__ = ["from_text", "operation_text", "to_text"]


def to_text(schedule: Schedule) -> str:
    """The schedule as text; `from_text` returns an equal one."""
    return "\n".join(_lines(schedule)) + "\n"


def _lines(schedule: Schedule) -> Iterator[str]:
    yield f"schedule {schedule.name} world_size={schedule.world_size} version={VERSION}"
    for buffer in schedule.buffers:
        yield _spaced(f"buffer {buffer.name} [{buffer.rows}, {buffer.cols}]", buffer.home, *_storage(buffer))
    for pad in schedule.pads:
        yield f"pad {pad.name} [{pad.size}]"
    for queue in schedule.queues:
        yield _spaced("queue", queue.name, queue.order, *(("after", *queue.after) if queue.after else ()))
    for giver, credits in groupby(schedule.credits, lambda credit: credit.giver):
        yield _spaced("credits", giver, "->", *(credit.taker for credit in credits))
    if schedule.reuse != CREDITS:
        yield _spaced("reuse", schedule.reuse)
    for given in schedule.given:
        yield f"given {given.region} = {given.tensor}[{given.row},{given.col}]"
    for goal in schedule.goal:
        yield _goal_line(goal)
    for rank, operations in groupby(schedule.operations, lambda operation: operation.rank):
        yield f"rank {rank}"
        for operation in operations:
            yield f"  {operation_text(operation)}"


def _storage(buffer: Buffer) -> Iterator[object]:
    if buffer.dtype:
        yield buffer.dtype
    if buffer.blocks:
        yield from ("blocks", f"{buffer.blocks.rows}x{buffer.blocks.cols}", "at", *buffer.blocks.places)


def _goal_line(goal: Goal) -> str:
    ranges = (*(("any",) if goal.unordered else ()), *(f"{lo}:{hi}" for lo, hi in goal.terms))
    terms = ("sum", *ranges) if ranges else ()
    return _spaced("goal", goal.region, "=", f"{goal.tensor}[{goal.row},{goal.col}]", *terms)


def operation_text(operation: Operation) -> str:
    """One operation on one line, without its rank."""
    waits = ("wait", *operation.waits) if operation.waits else ()
    notifies = ("signal", *operation.notifies) if operation.notifies else ()
    return _spaced(operation.queue, f"{operation.name}:", *_deed(operation), *waits, *notifies)


def _deed(operation: Operation) -> tuple[object, ...]:
    if isinstance(operation, Compute):
        arrow = "+->" if operation.accumulate else "->"
        tiles = (f"tiles={operation.tiles}",) if operation.tiles > 1 else ()
        before, behind = operation.addends[: operation.place], operation.addends[operation.place :]
        left = [word for part in before for word in (part, "+")]
        right = [word for part in behind for word in ("+", part)]
        late = ("late", *operation.late_waits) if operation.late_waits else ()
        late = ("scaled", *operation.scales, *late) if operation.scales else late
        product = (*left, *operation.a, "@", operation.b, *right)
        out = (*operation.out, "and", *operation.copies) if operation.copies else operation.out
        return (operation.function, *product, arrow, *out, *tiles, *_then(operation), *late)
    if isinstance(operation, Apply):
        tiles = ("tiles=" + ",".join(f"{lo}:{hi}" for lo, hi in operation.tiles),)
        late = ("reads", *map(_holds, operation.late_needs)) if operation.late_needs else ()
        late += ("late", *operation.late_waits) if operation.late_waits else ()
        needs, makes = map(_holds, operation.needs), map(_holds, operation.makes)
        return ("apply", f"function={operation.function}", *needs, "->", *makes, *tiles, *late)
    if isinstance(operation, Reduce):
        operands = [word for part in operation.operands for word in ("+", part)][1:]
        tiles = (f"tiles={operation.tiles}",) if operation.tiles > 1 else ()
        return ("reduce", *operands, "->", operation.out, *tiles, *_then(operation))
    moved = (*operation.sources, "->", *operation.destinations) if operation.sources or operation.destinations else ()
    if isinstance(operation, Collective):
        ranks = ",".join(map(str, operation.ranks))
        return (operation.function, f"label={operation.label}", f"ranks={ranks}", *moved, *_then(operation))
    delay = (f"delay_us={operation.delay_us}",) if isinstance(operation, Copy) and operation.delay_us else ()
    tiles = (f"tiles={operation.tiles}",) if isinstance(operation, Put) and operation.tiles > 1 else ()
    order = ("order=any",) if isinstance(operation, ReducePut) and operation.unordered else ()
    return (operation.__struct_config__.tag, *delay, *moved, *tiles, *order)


def _then(operation: Compute | Reduce | Collective) -> tuple[str, ...]:
    return ("then=finished",) if operation.finishes else ()


def _holds(held: Given | Goal) -> str:
    """`REGION=TENSOR[ROW,COL]`, and behind `/` the terms of a sum."""
    terms = ",".join(f"{lo}:{hi}" for lo, hi in held.terms) if isinstance(held, Goal) else ""
    return f"{held.region}={held.tensor}[{held.row},{held.col}]" + (f"/{terms}" if terms else "")


def _spaced(*words: object) -> str:
    return " ".join(map(str, words))
