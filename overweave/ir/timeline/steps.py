"""A schedule as a timeline without times: each operation takes one step, and begins as soon as the schedule lets it.

An operation begins behind its predecessor in its queue, behind the queues that its queue follows, and behind all that
signal what it waits for. Parts of one library collective begin together. How many steps a schedule takes says how long
its longest chain is, not how long a call takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from overweave.errors import InputError
from overweave.ir.schedule import Collective, Operation, Schedule
from overweave.ir.timeline.operations import kind_of, signalled
from overweave.ir.timeline.timeline import Arrow, Timeline, TimelineSpan, make_timeline


def timeline_of_steps(schedule: Schedule) -> Timeline:
    """Raises InputError for a schedule whose operations wait for each other in a circle."""
    groups: dict[str, set[str]] = {}
    for operation in schedule.operations:
        groups.setdefault(_group(operation), set())
    pairs = list(signalled(schedule))
    group_of = {operation.name: _group(operation) for operation in schedule.operations}
    for before, after in (*_queued(schedule), *pairs):
        groups[group_of[after]].add(group_of[before])
    begins: dict[str, int] = {}
    try:
        for group in TopologicalSorter(groups).static_order():
            begins[group] = max((begins[before] + 1 for before in groups[group]), default=0)
    except CycleError as circle:
        found = f"a circle of waits: {', '.join(map(str, circle.args[1][:5]))}"
        raise InputError(f"steps of {schedule.name}", found, "`overweave verify` says where") from None
    spans = [_span(operation, begins[_group(operation)]) for operation in schedule.operations]
    place = {operation.name: number for number, operation in enumerate(schedule.operations)}
    arrows = [Arrow(place[before], place[after]) for before, after in pairs]
    return make_timeline(schedule.name, "steps", schedule.world_size, spans, arrows)


def _group(operation: Operation) -> str:
    """The name under which the operation begins: all parts of a collective have one."""
    return f"collective {operation.label}" if isinstance(operation, Collective) else operation.name


def _span(operation: Operation, begin: int) -> TimelineSpan:
    return TimelineSpan(operation.rank, operation.queue, operation.name, kind_of(operation), begin, begin + 1)


def _queued(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """(before, after) by the order of queues."""
    follows = {queue.name: queue.after for queue in schedule.queues}
    last: dict[tuple[int, str], str] = {}
    for operation in schedule.operations:
        for queue in (operation.queue, *follows[operation.queue]):
            if (before := last.get((operation.rank, queue))) is not None:
                yield before, operation.name
        last[operation.rank, operation.queue] = operation.name
