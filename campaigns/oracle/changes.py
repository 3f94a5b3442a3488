"""How mutations pick something in a schedule and put something else in its place."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from random import Random
from typing import Any

from msgspec.structs import replace

from overweave.ir.schedule import Operation, Schedule


def picked_from(rng: Random, schedule: Schedule, fits: Callable[[Any], bool]) -> tuple[int, Any] | None:
    """A random operation that fits, with its position."""
    found = [at for at, operation in enumerate(schedule.operations) if fits(operation)]
    if not found:
        return None
    at = rng.choice(found)
    return at, schedule.operations[at]


Mutation = Callable[[Random, Schedule], Schedule | None]
Changed = Any  # what one operation becomes: an operation, a tuple of several or of none, or None: it stays
Change = Callable[[Random, Schedule, Any], Changed]


def of_one(fits: Callable[[Any], bool] = lambda operation: True) -> Callable[[Change], Mutation]:
    """Makes a mutation of what changes one operation: a random one that fits becomes what is returned."""

    def of(change: Change) -> Mutation:
        @wraps(change)
        def mutation(rng: Random, schedule: Schedule) -> Schedule | None:
            picked = picked_from(rng, schedule, fits)
            changed = None if picked is None else change(rng, schedule, picked[1])
            if picked is None or changed is None:
                return None
            return put_in_place(schedule, picked[0], *(changed if isinstance(changed, tuple) else (changed,)))

        return mutation

    return of


def put_in_place(schedule: Schedule, at: int, *operations: Operation) -> Schedule:
    """The schedule with other operations in place of one."""
    return replace(schedule, operations=schedule.operations[:at] + operations + schedule.operations[at + 1 :])


def changed_entry(
    rng: Random, schedule: Schedule, field: str, change: Callable[[Any], tuple[Any, ...]]
) -> Schedule | None:
    """One entry of a field of one operation, replaced by what `change` makes of it."""
    picked = picked_from(rng, schedule, lambda operation: bool(getattr(operation, field, ())))
    if picked is None:
        return None
    at, operation = picked
    entries = getattr(operation, field)
    index = rng.randrange(len(entries))
    return put_in_place(
        schedule, at, replace(operation, **{field: entries[:index] + change(entries[index]) + entries[index + 1 :]})
    )
