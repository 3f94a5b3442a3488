"""What a timeline takes from a schedule: as what an operation counts, and which operations wait for which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from overweave.ir.schedule import Apply, Collective, Compute, Operation, Reduce, Schedule
from overweave.ir.timeline.timeline import COLLECTIVE, COMPUTE, COPY, REDUCE, Arrow, SpanKind


def kind_of(operation: Operation) -> SpanKind:
    """What an operation counts as."""
    match operation:
        case Compute() | Apply():
            return COMPUTE
        case Reduce():
            return REDUCE
        case Collective():
            return COLLECTIVE
    return COPY


def notifiers(schedule: Schedule) -> dict[tuple[int, str, int], list[str]]:
    """Names of the operations that add to each signal, by (rank, pad, signal)."""
    found: dict[tuple[int, str, int], list[str]] = {}
    for operation in schedule.operations:
        for notify in operation.notifies:
            found.setdefault((notify.rank, notify.pad, notify.signal), []).append(operation.name)
    return found


def signalled(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """(source, target) of each operation that waits for a signal of another one, by name."""
    sources = notifiers(schedule)
    for operation in schedule.operations:
        for wait in operation.all_waits:
            for signal in range(*wait.signals):
                for source in sources.get((operation.rank, wait.pad, signal), ()):
                    yield source, operation.name


def arrows(schedule: Schedule, first: Mapping[str, int], last: Mapping[str, int]) -> Iterator[Arrow]:
    """From the last span of each operation that signals to the first span of each that waits for it."""
    for source, target in signalled(schedule):
        if source in last and target in first:
            yield Arrow(last[source], first[target])
