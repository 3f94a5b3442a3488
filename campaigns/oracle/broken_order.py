"""Ways to break what orders a schedule: signals, waits, credits, queues. None where there is nothing to change."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from msgspec.structs import replace

from campaigns.oracle.changes import Changed, changed_entry, of_one, picked_from, put_in_place
from overweave.ir.schedule import Collective, Compute, Notify, Operation, Schedule, Wait


def drop_signal(rng: Random, schedule: Schedule) -> Schedule | None:
    return changed_entry(rng, schedule, "notifies", lambda notify: ())


def duplicate_signal(rng: Random, schedule: Schedule) -> Schedule | None:
    return changed_entry(rng, schedule, "notifies", lambda notify: (notify, notify))


def misdirect_signal(rng: Random, schedule: Schedule) -> Schedule | None:
    """To another rank, or to another signal of the pad."""

    def change(notify: Notify) -> tuple[Notify, ...]:
        if rng.random() < 0.5 and schedule.world_size > 1:
            return (
                replace(notify, rank=(notify.rank + rng.randint(1, schedule.world_size - 1)) % schedule.world_size),
            )
        size = schedule.pad(notify.pad).size
        return (replace(notify, signal=(notify.signal + rng.randint(1, max(1, size - 1))) % size),)

    return changed_entry(rng, schedule, "notifies", change)


def _swapped(
    rng: Random, schedule: Schedule, field: str, fits: Callable[[Operation, Operation], bool] = lambda one, other: True
) -> Schedule | None:
    """Two operations of one rank that fit, each with what the other has in a field."""
    one = picked_from(rng, schedule, lambda its: bool(getattr(its, field)))
    other = one and picked_from(
        rng,
        schedule,
        lambda its: getattr(its, field) and its is not one[1] and its.rank == one[1].rank and fits(its, one[1]),
    )
    if one is None or other is None:
        return None
    for (at, its), theirs in ((one, other[1]), (other, one[1])):
        schedule = put_in_place(schedule, at, replace(its, **{field: getattr(theirs, field)}))
    return schedule


def swap_signals(rng: Random, schedule: Schedule) -> Schedule | None:
    """Two operations of one rank announce each other's signals: every count stays right."""
    return _swapped(rng, schedule, "notifies", lambda one, other: one.instances == other.instances)


def _some_waits(rng: Random, schedule: Schedule) -> str:
    """The field of the waits before operations start, or, where there are any, of those before they add."""
    has_late = any(operation.all_waits != operation.waits for operation in schedule.operations)
    return "late_waits" if has_late and rng.random() < 0.5 else "waits"


def drop_wait(rng: Random, schedule: Schedule) -> Schedule | None:
    return changed_entry(rng, schedule, _some_waits(rng, schedule), lambda wait: ())


def misdirect_wait(rng: Random, schedule: Schedule) -> Schedule | None:
    """For other signals of the pad, or for fewer."""

    def change(wait: Wait) -> tuple[Wait, ...]:
        lo, hi = wait.signals
        if hi - lo > 1 and rng.random() < 0.5:
            return (replace(wait, signals=rng.choice(((lo + 1, hi), (lo, hi - 1)))),)
        by = rng.choice((-2, -1, 1, 2))
        return (replace(wait, signals=(max(0, lo + by), max(0, hi + by))),)

    return changed_entry(rng, schedule, _some_waits(rng, schedule), change)


def swap_waits(rng: Random, schedule: Schedule) -> Schedule | None:
    """Two operations of one rank wait for what the other needs."""
    return _swapped(rng, schedule, "waits")


def wrong_count(rng: Random, schedule: Schedule) -> Schedule | None:
    field = _some_waits(rng, schedule)
    return changed_entry(
        rng, schedule, field, lambda wait: (replace(wait, count=max(1, wait.count + rng.choice((-1, 1, 1)))),)
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
    picked = picked_from(rng, schedule, lambda operation: True)
    if picked is None:
        return None
    at, operation = picked
    rest = list(schedule.operations[:at] + schedule.operations[at + 1 :])
    rest.insert(rng.randrange(len(rest) + 1), operation)
    return replace(schedule, operations=tuple(rest))


@of_one(lambda its: isinstance(its, Compute) and bool(its.addends))
def wait_too_late(rng: Random, schedule: Schedule, operation: Any) -> Changed:
    """What an operation waits for before it starts, it waits for only before it adds, or the other way round."""
    return replace(operation, waits=operation.late_waits, late_waits=operation.waits)


def cycle(rng: Random, schedule: Schedule) -> Schedule | None:
    """An operation also waits for a signal that its rank gets anyway, perhaps because of it."""
    waited = [(operation.rank, wait) for operation in schedule.operations for wait in operation.waits]
    picked = picked_from(rng, schedule, lambda operation: any(rank == operation.rank for rank, _ in waited))
    if picked is None:
        return None
    at, operation = picked
    wait = rng.choice([wait for rank, wait in waited if rank == operation.rank])
    return put_in_place(schedule, at, replace(operation, waits=(*operation.waits, wait)))


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
    picked = picked_from(rng, schedule, lambda operation: True)
    if picked is None or len(schedule.queues) < 2:
        return None
    at, operation = picked
    others = [queue.name for queue in schedule.queues if queue.name != operation.queue]
    return put_in_place(schedule, at, replace(operation, queue=rng.choice(others)))


def stale_read(rng: Random, schedule: Schedule) -> Schedule | None:
    """The wait stands on the next operation of the queue, so one reads what may not have arrived."""
    picked = picked_from(rng, schedule, lambda operation: bool(operation.waits))
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
    moved = put_in_place(schedule, later[0], replace(following, waits=following.waits + operation.waits))
    return put_in_place(moved, at, replace(operation, waits=()))


def collectives_in_another_order(rng: Random, schedule: Schedule) -> Schedule | None:
    """Two collectives of one rank change places."""
    rank = rng.randrange(schedule.world_size)
    places = [at for at, one in enumerate(schedule.operations) if isinstance(one, Collective) and one.rank == rank]
    if len(places) < 2:
        return None
    first, second = rng.sample(places, 2)
    one, other = schedule.operations[first], schedule.operations[second]
    return put_in_place(put_in_place(schedule, first, other), second, one)
