"""Waits of the caller's stream, by kernels with a deadline: a stream's own waits have none.

Side streams use stream waits, which hold no SM. For most of these signals some kernel waits, too; for the others the
caller's stream waits at the end of the call, so that a deadline covers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from overweave.ir.launch.streams import waits_without_deadline
from overweave.ir.plan import Plan
from overweave.ir.schedule import Operation, Wait
from overweave.ir.tile_order import NO_SIGNAL
from overweave.kernels.arguments import SignalWords
from overweave.memory.device.protocol import QUEUE_OPERATION
from overweave.memory.layout import SlotLayout
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.kernel_calls.protocol import wait_call

Enqueue = Callable[[int], None]


class DeviceSignals(NamedTuple):
    """Adjacent signals `[low, high)` of a slot, each of which must reach `full`."""

    low: int
    high: int
    full: int


class PlanWaits:
    """The waits of one rank's caller's stream, bound to a slot."""

    def __init__(self, plan: Plan, rank: int, layout: SlotLayout, protocol: SignalWords) -> None:
        self._plan, self._rank, self._layout, self._protocol = plan, rank, layout, protocol

    def of(self, operation: Operation) -> Enqueue:
        """Return a function that enqueues the waits of an operation on a stream."""
        queue = [other.name for other in self._plan.schedule.of_rank(self._rank) if other.queue == operation.queue]
        return self._bind(operation.all_waits, queue.index(operation.name))

    def at_end(self) -> tuple[Callable[..., None], ...]:
        """Return the last action of a call, if there is one: waits for signals that no kernel waits for."""
        uncovered = waits_without_deadline(self._plan, self._rank)
        if not uncovered:
            return ()
        wait = self._bind(uncovered, QUEUE_OPERATION.value)
        return (lambda stream, *arguments: wait(stream.cuda_stream),)

    def _bind(self, waits: Iterable[Wait], operation: int) -> Enqueue:
        counts = {self._layout.signal(wait.pad, at): wait.count for wait in waits for at in range(*wait.signals)}
        return bind_waits(counts, operation, self._layout.signals, self._protocol)


def bind_waits(counts: Mapping[int, int], operation: int, signals: int, protocol: SignalWords) -> Enqueue:
    """Return a function that enqueues waits on a stream. counts: number of a signal in the slot -> count. signals: of
    the slot. operation: for the report of a timeout."""
    ranges = pack_waits(merge_adjacent(counts))
    starts = [Launch(wait_call(protocol, one, operation, signals)).start for one in ranges]

    def enqueue(stream: int) -> None:
        for start in starts:
            start(stream)

    return enqueue


def merge_adjacent(counts: Mapping[int, int]) -> list[DeviceSignals]:
    """Merge signals with consecutive numbers and equal counts."""
    merged: list[DeviceSignals] = []
    for number in sorted(counts):
        last = merged[-1] if merged else None
        if last is not None and (last.high, last.full) == (number, counts[number]):
            merged[-1] = last._replace(high=number + 1)
        else:
            merged.append(DeviceSignals(number, number + 1, counts[number]))
    return merged


def pack_waits(ranges: Iterable[DeviceSignals]) -> Iterator[tuple[int, int, int, int, int]]:
    """Pack ranges into few waits (low, high, full, also, also_full): each has a range and a single signal, or none."""
    remaining = sorted(ranges, key=lambda signals: signals.high - signals.low)
    while remaining:
        longest = remaining.pop()
        has_single = bool(remaining) and remaining[0].high - remaining[0].low == 1
        also = remaining.pop(0) if has_single else DeviceSignals(NO_SIGNAL, NO_SIGNAL, 0)
        yield (*longest, also.low, also.full)
