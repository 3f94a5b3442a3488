"""What the operations of a schedule read and write, in words: what a reader of a timeline asks of a span."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from overweave.ir.dtype import Dtype
from overweave.ir.schedule import Collective, Operation, Region, Schedule
from overweave.ir.timeline.timeline import Content, Timeline

MOST_REGIONS = 2  # of each side: a fused matmul reads dozens


def with_contents(timeline: Timeline, schedule: Schedule, dtype: Dtype) -> Timeline:
    """The timeline of a schedule's call, which now also says what its operations read and write."""
    return replace(timeline, contents=contents_of(schedule, dtype))


def contents_of(schedule: Schedule, dtype: Dtype) -> tuple[Content, ...]:
    """One for each operation, in the order of the schedule. dtype: the plan's."""
    itemsizes = {buffer.name: buffer.itemsize_bytes(dtype) for buffer in schedule.buffers}

    def written_bytes(operation: Operation) -> int:
        return sum(each.shape[0] * each.shape[1] * itemsizes[each.buffer] for each in operation.writes)

    return tuple(Content(each.name, _words(each), written_bytes(each)) for each in schedule.operations)


def _words(operation: Operation) -> str:
    reads, writes = _some(operation.reads), _some(operation.writes)
    words = " to ".join(filter(None, (reads, writes))) or "nothing: it waits and signals"
    return f"{operation.function} {words}" if isinstance(operation, Collective) else words


def _some(regions: Sequence[Region]) -> str:
    there = [region for region in regions if not region.is_empty]
    more = f" and {len(there) - MOST_REGIONS} more" if len(there) > MOST_REGIONS else ""
    return ", ".join(map(str, there[:MOST_REGIONS])) + more
