"""What a timeline takes from a schedule: the kind of each operation, and which operations wait for which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from overweave.ir.schedule import Apply, Collective, Compute, Operation, Reduce, Schedule
from overweave.ir.timeline.timeline import COLLECTIVE, COMPUTE, COPY, REDUCE, Arrow, SpanKind


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
