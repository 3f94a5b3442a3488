"""Remove waits that another wait implies.

A stream or a copy engine notifies in order: a step that waits for a later piece has the earlier ones, too. Every signal
must still be waited for by some step, so that it can be used again. A row of a tile table holds one range of signals
and one more signal: if the fewest waits do not fit, all waits stay, and the signals between them join their range.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from overweave.ir.schedule import Apply, Operation, Queue, Wait
from overweave.schedules.communication import COMPLETE, Communication, MatmulChunk

PadSignal = tuple[str, int]  # pad and number, on the waiter's own rank
Sender = tuple[int, str, int]  # rank, queue, place in the launch order
LaunchPositions = Mapping[tuple[int, str], int]  # of a rank's operations, by name, in the order of their launch


def without_implied_waits(
    applies: list[Apply], communications: Iterable[Communication], places: LaunchPositions
) -> Iterator[Apply]:
    """Yield the kernel calls of one rank without waits that others of the same call imply, the rest as ranges.

    places: launch positions of all ranks' moves; moves of several tensors may share a queue.
    """
    if not applies:
        return
    known = list(communications)
    senders = _senders(known, applies[0].rank, places)
    pads = [pad.name for communication in known for pad in communication.pads]
    all_waits = [_expanded(apply.waits) for apply in applies]
    needed = [_without_implied(waits, senders) for waits in all_waits]
    late = {signal for apply in applies for signal in _expanded(apply.late_waits)}
    awaited = late.union(*needed)
    for waits, fewer in zip(all_waits, needed, strict=True):
        fewer |= {signal: count for signal, count in waits.items() if signal not in awaited}
        awaited |= fewer.keys()
    for apply, fewer, waits in zip(applies, needed, all_waits, strict=True):
        ranges = _as_ranges(fewer, pads)
        yield replace(apply, waits=ranges if fits_tile_row(ranges) else _as_ranges(_without_gaps(waits, senders), pads))


def without_repeated_waits(operations: Iterable[Operation], queues: Iterable[Queue]) -> Iterator[Operation]:
    """Yield the operations without waits that an earlier operation of the same in-order queue has made already."""
    ordered = {queue.name for queue in queues if queue.order == COMPLETE}
    seen: dict[tuple[int, str], set[PadSignal]] = {}
    for operation in operations:
        if operation.queue not in ordered or not operation.waits:
            yield operation
            continue
        known = seen.setdefault((operation.rank, operation.queue), set())
        waits = tuple(wait for wait in operation.waits if not _expanded((wait,)).keys() <= known)
        known.update(_expanded(operation.waits))
        yield replace(operation, waits=waits)


def fits_tile_row(waits: tuple[Wait, ...]) -> bool:
    """Return whether a row of a tile table holds the waits: a range of signals, and one more signal."""
    lengths = sorted((wait.signals[1] - wait.signals[0] for wait in waits), reverse=True)
    return len(lengths) <= 2 and all(length <= 1 for length in lengths[1:])


def _senders(communications: list[Communication], rank: int, places: LaunchPositions) -> dict[PadSignal, list[Sender]]:
    """Return signal of `rank` -> the steps that notify it. A step outside in-order queues has the queue ""."""
    senders: dict[PadSignal, list[Sender]] = {}
    for communication in communications:
        ordered = {queue.name for queue in communication.queues if queue.order == COMPLETE}
        for step in communication.steps:
            queue = "" if isinstance(step, MatmulChunk) or step.queue not in ordered else step.queue
            for notify in step.notifies:
                if notify.rank == rank:
                    place = places.get((step.rank, step.name), -1)
                    senders.setdefault((notify.pad, notify.signal), []).append((step.rank, queue, place))
    return senders


def _without_implied(waits: dict[PadSignal, int], senders: dict[PadSignal, list[Sender]]) -> dict[PadSignal, int]:
    """Return the waits without those whose only sender precedes that of another wait in an in-order queue."""
    latest: dict[tuple[int, str], int] = {}
    for signal in waits:
        for rank, queue, place in senders.get(signal, []):
            latest[rank, queue] = max(latest.get((rank, queue), -1), place)

    def is_implied(signal: PadSignal) -> bool:
        one = senders.get(signal, [])
        return len(one) == 1 and bool(one[0][1]) and latest[one[0][0], one[0][1]] > one[0][2]

    return {signal: count for signal, count in waits.items() if not is_implied(signal)}


def _without_gaps(waits: dict[PadSignal, int], senders: dict[PadSignal, list[Sender]]) -> dict[PadSignal, int]:
    """Return the waits, and those for the signals between them if steps notify all of these (of no rows)."""
    filled = dict(waits)
    for pad in {pad for pad, _ in waits}:
        numbers = [signal for one, signal in waits if one == pad]
        between = [(pad, signal) for signal in range(min(numbers), max(numbers))]
        if len({waits[pad, signal] for signal in numbers}) == 1 and all(signal in senders for signal in between):
            filled |= dict.fromkeys(between, waits[pad, numbers[0]])
    return filled


def _expanded(waits: Iterable[Wait]) -> dict[PadSignal, int]:
    """Return signal -> count of all signals in the ranges."""
    return {(wait.pad, signal): wait.count for wait in waits for signal in range(*wait.signals)}


def _as_ranges(waits: dict[PadSignal, int], pads: list[str]) -> tuple[Wait, ...]:
    """Return the waits, consecutive signals of a pad with one count as a range."""
    ranges: list[Wait] = []
    for pad, signal in sorted(waits, key=lambda one: (pads.index(one[0]), one[1])):
        count = waits[pad, signal]
        last = ranges[-1] if ranges else None
        if last and (last.pad, last.signals[1], last.count) == (pad, signal, count):
            ranges[-1] = Wait(pad, (last.signals[0], signal + 1), count)
        else:
            ranges.append(Wait(pad, (signal, signal + 1), count))
    return tuple(ranges)
