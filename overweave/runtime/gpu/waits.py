"""What the caller's stream waits for, by kernels that have a deadline: a stream's own waits have none.

Streams beside the caller's wait on their own, for they must not hold an SM. Most of what they wait for a kernel waits
for, too; what no kernel hears of is waited for at the end of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from overweave.ir.launch.waits_without_deadline import waits_without_deadline
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
    """Neighbours among the signals of a slot, and what each counts to."""

    low: int
    high: int
    full: int


class PlanWaits:
    """The waits of one rank's caller's stream, bound to a slot."""

    def __init__(self, plan: Plan, rank: int, layout: SlotLayout, protocol: SignalWords) -> None:
        self._plan, self._rank, self._layout, self._protocol = plan, rank, layout, protocol

    def of(self, operation: Operation) -> Enqueue:
        """What puts the waits of an operation on a stream."""
        queue = [other.name for other in self._plan.schedule.of_rank(self._rank) if other.queue == operation.queue]
        return self._enqueued(operation.all_waits, queue.index(operation.name))

    def at_end(self) -> tuple[Callable[..., None], ...]:
        """The last action of a call, if it has one: waits for what no kernel would hear of. It is given a stream."""
        missed = waits_without_deadline(self._plan, self._rank)
        if not missed:
            return ()
        wait = self._enqueued(missed, QUEUE_OPERATION.value)
        return (lambda stream, *given: wait(stream.cuda_stream),)

    def _enqueued(self, waits: Iterable[Wait], operation: int) -> Enqueue:
        counts = {self._layout.signal(wait.pad, at): wait.count for wait in waits for at in range(*wait.signals)}
        return bind_waits(counts, operation, self._layout.signals, self._protocol)


def bind_waits(counts: Mapping[int, int], operation: int, signals: int, protocol: SignalWords) -> Enqueue:
    """What puts waits on a stream. counts: by the number of each signal among all of the slot, so many signals.
    operation: for a report."""
    awaited = pack_waits(merge_adjacent(counts))
    starts = [Launch(wait_call(protocol, one, operation, signals)).start for one in awaited]

    def enqueue(stream: int) -> None:
        for start in starts:
            start(stream)

    return enqueue


def merge_adjacent(counts: Mapping[int, int]) -> list[DeviceSignals]:
    """Signals with numbers in a row that count alike, together."""
    found: list[DeviceSignals] = []
    for number in sorted(counts):
        last = found[-1] if found else None
        if last is not None and (last.high, last.full) == (number, counts[number]):
            found[-1] = last._replace(high=number + 1)
        else:
            found.append(DeviceSignals(number, number + 1, counts[number]))
    return found


def pack_waits(awaited: Iterable[DeviceSignals]) -> Iterator[tuple[int, int, int, int, int]]:
    """As few waits as the kernel can tell: each of a range, and of one more signal with its own count, or none."""
    left = sorted(awaited, key=lambda some: some.high - some.low)  # the longest last
    while left:
        some = left.pop()
        has_single = bool(left) and left[0].high - left[0].low == 1
        also = left.pop(0) if has_single else DeviceSignals(NO_SIGNAL, NO_SIGNAL, 0)
        yield (*some, also.low, also.full)
