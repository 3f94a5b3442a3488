"""A schedule as a timeline without times: each operation takes one step, and begins as soon as the schedule lets it.

An operation begins after its predecessor in its queue, after the queues that its queue is after, and after all
operations that notify the signals it waits for. Parts of one collective begin together. The number of steps is the
length of the longest chain of operations, not the time of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from overweave.errors import InputError
from overweave.ir.schedule import Collective, Operation, Schedule
from overweave.ir.timeline.operations import kind_of, signal_edges
from overweave.ir.timeline.timeline import Arrow, Timeline, TimelineSpan, make_timeline


def timeline_of_steps(schedule: Schedule) -> Timeline:
    """Return the timeline. Raises InputError for a schedule whose operations wait for each other in a cycle."""
    groups: dict[str, set[str]] = {}
    for operation in schedule.operations:
        groups.setdefault(_group(operation), set())
    pairs = list(signal_edges(schedule))
    group_of = {operation.name: _group(operation) for operation in schedule.operations}
    for before, after in (*_queue_edges(schedule), *pairs):
        groups[group_of[after]].add(group_of[before])
    begins: dict[str, int] = {}
    try:
        for group in TopologicalSorter(groups).static_order():
            begins[group] = max((begins[before] + 1 for before in groups[group]), default=0)
    except CycleError as circle:
        cycle = f"a circle of waits: {', '.join(map(str, circle.args[1][:5]))}"
        raise InputError(f"steps of {schedule.name}", cycle, "`overweave verify` says where") from None
    spans = [_span(operation, begins[_group(operation)]) for operation in schedule.operations]
    place = {operation.name: number for number, operation in enumerate(schedule.operations)}
    arrows = [Arrow(place[before], place[after]) for before, after in pairs]
    return make_timeline(schedule.name, "steps", schedule.world_size, spans, arrows)


def _group(operation: Operation) -> str:
    """Return the name under which the operation begins: the parts of a collective share one."""
    return f"collective {operation.label}" if isinstance(operation, Collective) else operation.name


def _span(operation: Operation, begin: int) -> TimelineSpan:
    return TimelineSpan(operation.rank, operation.queue, operation.name, kind_of(operation), begin, begin + 1)


def _queue_edges(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """Yield (before, after), names of operations, by the order of queues."""
    follows = {queue.name: queue.after for queue in schedule.queues}
    last: dict[tuple[int, str], str] = {}
    for operation in schedule.operations:
        for queue in (operation.queue, *follows[operation.queue]):
            if (before := last.get((operation.rank, queue))) is not None:
                yield before, operation.name
        last[operation.rank, operation.queue] = operation.name
