"""Descriptions of what a schedule's operations read and write, for readers of a timeline."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from overweave.ir.dtype import Dtype
from overweave.ir.schedule import Collective, Operation, Region, Schedule
from overweave.ir.timeline.timeline import Content, Timeline

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
    words = " to ".join(filter(None, (reads, writes))) or "nothing: it waits and signals"
    return f"{operation.function} {words}" if isinstance(operation, Collective) else words


def _first_regions(regions: Sequence[Region]) -> str:
    """Return the first regions that are not empty, and how many more there are."""
    filled = [region for region in regions if not region.is_empty]
    more = f" and {len(filled) - MOST_REGIONS} more" if len(filled) > MOST_REGIONS else ""
    return ", ".join(map(str, filled[:MOST_REGIONS])) + more
