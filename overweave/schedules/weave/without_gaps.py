"""Signals that every rank hears, numbered without gaps: what all of its peers announce is one range.

Templates number signals by owner and piece, so that a rank's own are a gap among those of its peers. A tile that reads
the rows of all ranks waits for all of them, and its row of the table tells one range.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from overweave.ir.schedule import Operation, SignalPad, Wait
from overweave.schedules.communication import Chunk, Communication


def without_gaps(made: Communication) -> Communication:
    """The same, each rank's signals of a pad numbered anew, in the order that they have."""
    told = sorted({(one.rank, one.pad, one.signal) for step in made.steps for one in step.notifies})
    counts: dict[tuple[int, str], int] = {}
    numbers: dict[tuple[int, str, int], int] = {}
    for rank, pad, signal in told:
        numbers[rank, pad, signal] = counts.get((rank, pad), 0)
        counts[rank, pad] = numbers[rank, pad, signal] + 1

    def heard(rank: int, wait: Wait) -> Wait:
        known = [numbers[rank, wait.pad, one] for one in range(*wait.signals) if (rank, wait.pad, one) in numbers]
        return replace(wait, signals=(known[0], known[-1] + 1)) if known else wait

    def one(step: Operation | Chunk) -> Any:
        notifies = tuple(replace(each, signal=numbers[each.rank, each.pad, each.signal]) for each in step.notifies)
        return replace(step, notifies=notifies, waits=tuple(heard(step.rank, wait) for wait in step.waits))

    sizes = {pad.name: max((n for (_, name), n in counts.items() if name == pad.name), default=0) for pad in made.pads}
    pads = tuple(SignalPad(name, size) for name, size in sizes.items() if size)
    return replace(made, pads=pads, steps=tuple(map(one, made.steps)))
