"""Ways to break a schedule, one small change each. A mutation returns None where there is nothing to change."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from msgspec.structs import replace

from overweave.ir.schedule import Compute, Copy, Get, Notify, Operation, Put, Reduce, ReducePut, Region, Schedule, Wait

Mutation = Callable[[Random, Schedule], Schedule | None]
MOVES = (Put, Get, Copy, ReducePut)


def _pick(rng: Random, schedule: Schedule, fits: Callable[[Any], bool]) -> tuple[int, Any] | None:
    """A random operation that fits, with its position."""
    found = [at for at, operation in enumerate(schedule.operations) if fits(operation)]
    if not found:
        return None
    at = rng.choice(found)
    return at, schedule.operations[at]


def _with(schedule: Schedule, at: int, *operations: Operation) -> Schedule:
    """The schedule with other operations in place of one."""
    return replace(schedule, operations=schedule.operations[:at] + operations + schedule.operations[at + 1 :])


def _changed(rng: Random, schedule: Schedule, field: str, change: Callable[[Any], tuple[Any, ...]]) -> Schedule | None:
    """One entry of a field of one operation, replaced by what `change` makes of it."""
    picked = _pick(rng, schedule, lambda operation: bool(getattr(operation, field)))
    if picked is None:
        return None
    at, operation = picked
    entries = getattr(operation, field)
    index = rng.randrange(len(entries))
    return _with(
        schedule, at, replace(operation, **{field: entries[:index] + change(entries[index]) + entries[index + 1 :]})
    )


def drop_signal(rng: Random, schedule: Schedule) -> Schedule | None:
    return _changed(rng, schedule, "notifies", lambda notify: ())


def duplicate_signal(rng: Random, schedule: Schedule) -> Schedule | None:
    return _changed(rng, schedule, "notifies", lambda notify: (notify, notify))


def misdirect_signal(rng: Random, schedule: Schedule) -> Schedule | None:
    """To another rank, or to another signal of the pad."""

    def change(notify: Notify) -> tuple[Notify, ...]:
        if rng.random() < 0.5 and schedule.world_size > 1:
            return (
                replace(notify, rank=(notify.rank + rng.randint(1, schedule.world_size - 1)) % schedule.world_size),
            )
        size = schedule.pad(notify.pad).size
        return (replace(notify, signal=(notify.signal + rng.randint(1, max(1, size - 1))) % size),)

    return _changed(rng, schedule, "notifies", change)


def swap_signals(rng: Random, schedule: Schedule) -> Schedule | None:
    """Two operations of one rank announce each other's signals: every count stays right."""
    one = _pick(rng, schedule, lambda operation: bool(operation.notifies))
    if one is None:
        return None
    at, operation = one
    other = _pick(
        rng,
        schedule,
        lambda its: (
            its.notifies and its is not operation and (its.rank, its.instances) == (operation.rank, operation.instances)
        ),
    )
    if other is None:
        return None
    swapped = _with(schedule, at, replace(operation, notifies=other[1].notifies))
    return _with(swapped, other[0], replace(other[1], notifies=operation.notifies))


def drop_wait(rng: Random, schedule: Schedule) -> Schedule | None:
    return _changed(rng, schedule, "waits", lambda wait: ())


def misdirect_wait(rng: Random, schedule: Schedule) -> Schedule | None:
    """For other signals of the pad, or for fewer."""

    def change(wait: Wait) -> tuple[Wait, ...]:
        lo, hi = wait.signals
        if hi - lo > 1 and rng.random() < 0.5:
            return (replace(wait, signals=rng.choice(((lo + 1, hi), (lo, hi - 1)))),)
        by = rng.choice((-2, -1, 1, 2))
        return (replace(wait, signals=(max(0, lo + by), max(0, hi + by))),)

    return _changed(rng, schedule, "waits", change)


def swap_waits(rng: Random, schedule: Schedule) -> Schedule | None:
    """Two operations of one rank wait for what the other needs."""
    one = _pick(rng, schedule, lambda operation: bool(operation.waits))
    if one is None:
        return None
    at, operation = one
    other = _pick(rng, schedule, lambda its: its.waits and its is not operation and its.rank == operation.rank)
    if other is None:
        return None
    swapped = _with(schedule, at, replace(operation, waits=other[1].waits))
    return _with(swapped, other[0], replace(other[1], waits=operation.waits))


def wrong_count(rng: Random, schedule: Schedule) -> Schedule | None:
    return _changed(
        rng, schedule, "waits", lambda wait: (replace(wait, count=max(1, wait.count + rng.choice((-1, 1, 1)))),)
    )


def _moves_something(operation: Operation) -> bool:
    return isinstance(operation, MOVES) and any(not part.is_empty for part in operation.sources)


def drop_chunk(rng: Random, schedule: Schedule) -> Schedule | None:
    """The move is gone, or only its data: it still waits and signals."""
    picked = _pick(rng, schedule, _moves_something)
    if picked is None:
        return None
    at, move = picked
    silent = Copy(
        name=move.name,
        rank=move.rank,
        queue=move.queue,
        waits=move.waits,
        notifies=move.notifies,
        sources=(),
        destinations=(),
    )
    return _with(schedule, at, *((silent,) if rng.random() < 0.7 else ()))


def duplicate_chunk(rng: Random, schedule: Schedule) -> Schedule | None:
    """The chunk moves twice, and signals once or twice."""
    picked = _pick(rng, schedule, _moves_something)
    if picked is None:
        return None
    at, move = picked
    again = replace(move, name=f"{move.name}.again", notifies=move.notifies if rng.random() < 0.3 else ())
    return _with(schedule, at, move, again)


def _shifted(rng: Random, schedule: Schedule, region: Region) -> Region:
    """Rows moved by one or by their number; within the buffer if that is possible, past it if not."""
    height, rows = max(1, region.shape[0]), schedule.buffer(region.buffer).rows
    shifts = [by for by in (-height, -1, 1, height) if region.rows[0] + by >= 0 and region.rows[1] + by <= rows]
    by = rng.choice(shifts or [1])
    return replace(region, rows=(region.rows[0] + by, region.rows[1] + by))


def misdirect_chunk(rng: Random, schedule: Schedule) -> Schedule | None:
    """From or to other rows, or from or to another rank."""
    picked = _pick(rng, schedule, _moves_something)
    if picked is None:
        return None
    at, move = picked
    field = rng.choice(("sources", "destinations"))
    regions = list(getattr(move, field))
    index = rng.randrange(len(regions))
    if rng.random() < 0.3:
        regions[index] = replace(regions[index], rank=rng.randrange(schedule.world_size))
    else:
        regions[index] = _shifted(rng, schedule, regions[index])
    return _with(schedule, at, replace(move, **{field: tuple(regions)}))


def drop_tile(rng: Random, schedule: Schedule) -> Schedule | None:
    """A Compute or Reduce is gone, does one tile less, or leaves out its last row."""
    picked = _pick(rng, schedule, lambda operation: isinstance(operation, Compute | Reduce))
    if picked is None:
        return None
    at, operation = picked
    kind = rng.random()
    if kind < 0.35:
        return _with(schedule, at)
    if kind < 0.6 and operation.instances > 1:
        return _with(schedule, at, replace(operation, tiles=operation.tiles - 1))
    if isinstance(operation, Compute):
        a, out = operation.a[-1], operation.out[-1]
        shorter = [replace(part, rows=(part.rows[0], max(part.rows[0], part.rows[1] - 1))) for part in (a, out)]
        cut = replace(operation, a=(*operation.a[:-1], shorter[0]), out=(*operation.out[:-1], shorter[1]))
        return _with(schedule, at, cut)
    parts = [
        replace(part, rows=(part.rows[0], max(part.rows[0], part.rows[1] - 1)))
        for part in (*operation.operands, operation.out)
    ]
    return _with(schedule, at, replace(operation, operands=tuple(parts[:-1]), out=parts[-1]))


def duplicate_tile(rng: Random, schedule: Schedule) -> Schedule | None:
    picked = _pick(rng, schedule, lambda operation: isinstance(operation, Compute | Reduce))
    if picked is None:
        return None
    at, operation = picked
    if isinstance(operation, Compute) and rng.random() < 0.4:
        return _with(schedule, at, replace(operation, tiles=operation.tiles + 1))
    return _with(schedule, at, operation, replace(operation, name=f"{operation.name}.again", notifies=()))


def misdirect_tile(rng: Random, schedule: Schedule) -> Schedule | None:
    """It reads or writes other rows."""
    picked = _pick(rng, schedule, lambda operation: isinstance(operation, Compute | Reduce))
    if picked is None:
        return None
    at, operation = picked
    if isinstance(operation, Reduce):
        if rng.random() < 0.5:
            return _with(schedule, at, replace(operation, out=_shifted(rng, schedule, operation.out)))
        index = rng.randrange(len(operation.operands))
        operands = list(operation.operands)
        operands[index] = _shifted(rng, schedule, operands[index])
        return _with(schedule, at, replace(operation, operands=tuple(operands)))
    field = rng.choice(("a", "out"))
    return _with(
        schedule,
        at,
        replace(operation, **{field: tuple(_shifted(rng, schedule, part) for part in getattr(operation, field))}),
    )


def early_reuse(rng: Random, schedule: Schedule) -> Schedule | None:
    """A credit is not waited for."""
    if not schedule.credits:
        return None
    at = rng.randrange(len(schedule.credits))
    return replace(schedule, credits=schedule.credits[:at] + schedule.credits[at + 1 :])


def few_credits(rng: Random, schedule: Schedule) -> Schedule | None:
    """Only some credits are waited for."""
    if not schedule.credits:
        return None
    share = rng.choice((0.3, 0.6, 0.8))
    return replace(schedule, credits=tuple(credit for credit in schedule.credits if rng.random() < share))


def launch_order(rng: Random, schedule: Schedule) -> Schedule | None:
    """An operation is launched elsewhere among its rank's: often behind what waits for it, which is a cycle."""
    picked = _pick(rng, schedule, lambda operation: True)
    if picked is None:
        return None
    at, operation = picked
    rest = list(schedule.operations[:at] + schedule.operations[at + 1 :])
    rest.insert(rng.randrange(len(rest) + 1), operation)
    return replace(schedule, operations=tuple(rest))


def cycle(rng: Random, schedule: Schedule) -> Schedule | None:
    """An operation also waits for a signal that its rank gets anyway, perhaps because of it."""
    waited = [(operation.rank, wait) for operation in schedule.operations for wait in operation.waits]
    picked = _pick(rng, schedule, lambda operation: any(rank == operation.rank for rank, _ in waited))
    if picked is None:
        return None
    at, operation = picked
    wait = rng.choice([wait for rank, wait in waited if rank == operation.rank])
    return _with(schedule, at, replace(operation, waits=(*operation.waits, wait)))


def _grown(operation: Any, by: int, down: bool) -> Operation:
    """Reaches over `by` more rows, at the bottom or at the top, of what it reads and of what it writes."""
    fields = ("a", "out") if isinstance(operation, Compute) else ("sources", "destinations")
    grown = {}
    for field in fields:
        first, *rest = getattr(operation, field)
        lo, hi = first.rows
        grown[field] = (replace(first, rows=(lo, hi + by) if down else (lo - by, hi)), *rest)
    return replace(operation, **grown)


def _is_within(schedule: Schedule, operation: Operation) -> bool:
    return all(
        region.rows[0] >= 0 and region.rows[1] <= schedule.buffer(region.buffer).rows
        for region in (*operation.reads, *operation.writes)
    )


def overlap(rng: Random, schedule: Schedule) -> Schedule | None:
    """A chunk or a tile reaches one row into its neighbour."""
    grown = [
        (at, bigger)
        for at, operation in enumerate(schedule.operations)
        if _moves_something(operation) or isinstance(operation, Compute)
        for bigger in (_grown(operation, 1, False), _grown(operation, 1, True))
        if _is_within(schedule, bigger)
    ]
    return _with(schedule, *rng.choice(grown)) if grown else None


def out_of_bounds(rng: Random, schedule: Schedule) -> Schedule | None:
    """A chunk or a tile reaches past its buffer."""
    picked = _pick(rng, schedule, lambda operation: _moves_something(operation) or isinstance(operation, Compute))
    if picked is None:
        return None
    at, operation = picked
    rows = max(buffer.rows for buffer in schedule.buffers)
    return _with(schedule, at, _grown(operation, rows, rng.random() < 0.5))


def contribution_order(rng: Random, schedule: Schedule) -> Schedule | None:
    """Operands, or the terms of a goal, are added in another order."""
    picked = _pick(rng, schedule, lambda operation: isinstance(operation, Reduce) and len(operation.operands) > 1)
    if picked is not None and rng.random() < 0.7:
        at, operation = picked
        operands = list(operation.operands)
        first, second = rng.sample(range(len(operands)), 2)
        operands[first], operands[second] = operands[second], operands[first]
        return _with(schedule, at, replace(operation, operands=tuple(operands)))
    goals = [at for at, goal in enumerate(schedule.goal) if len(goal.terms) > 1]
    if not goals:
        return None
    at = rng.choice(goals)
    goal = schedule.goal[at]
    turned = replace(goal, terms=goal.terms[1:] + goal.terms[:1])
    return replace(schedule, goal=(*schedule.goal[:at], turned, *schedule.goal[at + 1 :]))


def issue_for_completion(rng: Random, schedule: Schedule) -> Schedule | None:
    """A queue orders by issue only, or its kernel starts before what it stands behind has ended."""
    at = rng.randrange(len(schedule.queues))
    queue = schedule.queues[at]
    if queue.order == "complete" and (not queue.after or rng.random() < 0.5):
        queue = replace(queue, order="issue")
    elif queue.after:
        queue = replace(queue, after=())
    else:
        return None
    return replace(schedule, queues=(*schedule.queues[:at], queue, *schedule.queues[at + 1 :]))


def wrong_queue(rng: Random, schedule: Schedule) -> Schedule | None:
    """An operation runs in another queue."""
    picked = _pick(rng, schedule, lambda operation: True)
    if picked is None or len(schedule.queues) < 2:
        return None
    at, operation = picked
    others = [queue.name for queue in schedule.queues if queue.name != operation.queue]
    return _with(schedule, at, replace(operation, queue=rng.choice(others)))


def stale_read(rng: Random, schedule: Schedule) -> Schedule | None:
    """The wait stands on the next operation of the queue, so one reads what may not have arrived."""
    picked = _pick(rng, schedule, lambda operation: bool(operation.waits))
    if picked is None:
        return None
    at, operation = picked
    later = [
        index
        for index in range(at + 1, len(schedule.operations))
        if (schedule.operations[index].rank, schedule.operations[index].queue) == (operation.rank, operation.queue)
    ]
    if not later:
        return None
    following = schedule.operations[later[0]]
    moved = _with(schedule, later[0], replace(following, waits=following.waits + operation.waits))
    return _with(moved, at, replace(operation, waits=()))


def wrong_slot(rng: Random, schedule: Schedule) -> Schedule | None:
    """Something is read from the place of another chunk, of the same shape."""
    regions = [region for operation in schedule.operations for region in operation.reads if not region.is_empty]
    picked = _pick(
        rng, schedule, lambda operation: _moves_something(operation) or isinstance(operation, Compute | Reduce)
    )
    if picked is None:
        return None
    at, operation = picked
    field = {Compute: "a", Reduce: "operands"}.get(type(operation), "sources")
    parts = list(getattr(operation, field))
    index = rng.randrange(len(parts))
    others = [
        region
        for region in regions
        if region != parts[index] and (region.shape, region.rank) == (parts[index].shape, parts[index].rank)
    ]
    if not others:
        return None
    parts[index] = rng.choice(others)
    return _with(schedule, at, replace(operation, **{field: tuple(parts)}))


def two_at_once(rng: Random, schedule: Schedule) -> Schedule | None:
    """Two small changes: one may hide the other."""
    first, second = rng.sample(_SINGLE, 2)
    changed = first(rng, schedule)
    return second(rng, changed) if changed is not None else None


_SINGLE: tuple[Mutation, ...] = (
    drop_signal,
    duplicate_signal,
    misdirect_signal,
    swap_signals,
    drop_wait,
    misdirect_wait,
    swap_waits,
    wrong_count,
    drop_chunk,
    duplicate_chunk,
    misdirect_chunk,
    drop_tile,
    duplicate_tile,
    misdirect_tile,
    early_reuse,
    few_credits,
    launch_order,
    cycle,
    overlap,
    out_of_bounds,
    contribution_order,
    issue_for_completion,
    wrong_queue,
    stale_read,
    wrong_slot,
)
MUTATIONS: dict[str, Mutation] = {mutation.__name__: mutation for mutation in (*_SINGLE, two_at_once)}
