"""What a timeline takes from a schedule: kinds of operations, who waits for whom, contents, and steps without times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.dtype import Dtype
from overweave.ir.schedule import Apply, Collective, Compute, Operation, Reduce, Region, Retire, Schedule
from overweave.ir.timeline.timeline import (
    COLLECTIVE,
    COMPUTE,
    COPY,
    REDUCE,
    Arrow,
    Content,
    SpanKind,
    Timeline,
    TimelineSpan,
    make_timeline,
)


def kind_of(operation: Operation) -> SpanKind:
    """Return the kind of span that an operation is."""
    match operation:
        case Compute() | Apply():
            return COMPUTE
        case Reduce():
            return REDUCE
        case Collective():
            return COLLECTIVE
    return COPY


def notifiers(schedule: Schedule) -> dict[tuple[int, str, int], list[str]]:
    """Return (rank, pad, signal) -> names of the operations that add to the signal."""
    names: dict[tuple[int, str, int], list[str]] = {}
    for operation in schedule.operations:
        for notify in operation.notifies:
            names.setdefault((notify.rank, notify.pad, notify.signal), []).append(operation.name)
    return names


def signal_edges(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """Yield (source, target), names of operations, for each operation that waits for a signal of another one."""
    sources = notifiers(schedule)
    for operation in schedule.operations:
        for wait in operation.all_waits:
            for signal in range(*wait.signals):
                for source in sources.get((operation.rank, wait.pad, signal), ()):
                    yield source, operation.name


def arrows(schedule: Schedule, first: Mapping[str, int], last: Mapping[str, int]) -> Iterator[Arrow]:
    """Yield an arrow from the last span of each operation that notifies to the first span of each that waits for it.
    first, last: name of an operation -> index of that span."""
    for source, target in signal_edges(schedule):
        if source in last and target in first:
            yield Arrow(last[source], first[target])


# Descriptions of what a schedule's operations read and write, for readers of a timeline.


MOST_REGIONS = 2  # of each side: a fused matmul reads dozens


def with_contents(timeline: Timeline, schedule: Schedule, dtype: Dtype) -> Timeline:
    """Return the timeline of a schedule's call with descriptions of its operations."""
    return replace(timeline, contents=contents_of(schedule, dtype))


def contents_of(schedule: Schedule, dtype: Dtype) -> tuple[Content, ...]:
    """Return one Content for each operation, in the order of the schedule. dtype: the plan's."""
    itemsizes = {buffer.name: buffer.itemsize_bytes(dtype) for buffer in schedule.buffers}

    def written_bytes(operation: Operation) -> int:
        return sum(each.shape[0] * each.shape[1] * itemsizes[each.buffer] for each in operation.writes)

    return tuple(Content(each.name, _words(each), written_bytes(each)) for each in schedule.operations)


def _words(operation: Operation) -> str:
    """Return what an operation reads and writes: `a@0[0:64,0:32] to b@1[0:64,0:32]`."""
    reads, writes = _first_regions(operation.reads), _first_regions(operation.writes)
    if isinstance(operation, Retire):
        return f"the end of {_first_regions(operation.regions)}"
    words = " to ".join(filter(None, (reads, writes))) or "nothing: it waits and signals"
    return f"{operation.function} {words}" if isinstance(operation, Collective) else words


def _first_regions(regions: Sequence[Region]) -> str:
    """Return the first regions that are not empty, and how many more there are."""
    filled = [region for region in regions if not region.is_empty]
    more = f" and {len(filled) - MOST_REGIONS} more" if len(filled) > MOST_REGIONS else ""
    return ", ".join(map(str, filled[:MOST_REGIONS])) + more


# A schedule as a timeline without times: each operation takes one step, and begins as soon as the schedule lets it.
#
# An operation begins after its predecessor in its queue, after the queues that its queue is after, and after all
# operations that notify the signals it waits for. Parts of one collective begin together. The number of steps is the
# length of the longest chain of operations, not the time of a call.


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
