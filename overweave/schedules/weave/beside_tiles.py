"""Puts that the tiles of a kernel carry: a program that has claimed a tile first moves a slice of what goes to peers.

Slices are claimed in order, one by every program that claims a tile, and whoever is about to wait claims more until all
that its tile may depend on are under way. Slices wait for nothing, so whatever few programs run, they move: a Put that
stands before an Apply has been moved, or is being moved, when that Apply waits.
SOURCE: AutoOverlap 5 (communication on co-located SMs); Flux for tiles that serve their peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.schedule import Apply, Operation, Put, Region
from overweave.schedules.communication import MatmulChunk, shifted

Announced = Mapping[tuple[int, str, int], int]  # of a rank's pad and signal: the place of its Put among its sender's
LEAST_SLICE = 8 << 10  # elements, as a release to a peer should be short beside what it announces


def slice_rows(rows: int, cols: int, tiles: int) -> int:
    """The rows of a slice of a shard of `rows` rows: `tiles` tiles carry one slice each, and together the whole shard.

    A slice has at least LEAST_SLICE elements; then some tiles carry none.
    """
    return max(1, -(-rows // max(1, tiles)), -(-LEAST_SLICE // max(1, cols)))


def from_workspace(put: Put, own: MatmulChunk | None, buffer: str) -> Put:
    """The same push, from where the kernel's own rows are copied before it. own: the caller's rows of the tensor; None
    where the schedule itself copies them, for peers that come for them, or where the rank has none.
    """
    if own is None:
        return replace(put, sources=tuple(Region(buffer, put.rank, to.rows, to.cols) for to in put.destinations))
    (lo, hi), by = own.region.rows, own.rows[0] - own.region.rows[0]
    for source in put.sources:
        if not source.is_empty and not lo <= source.rows[0] <= source.rows[1] <= hi:
            found = f"{put.name} sends {source}, to which the kernel has no pointer"
            cure = "Use mover=copy_engine, or a kernel that loads by pointers, with shards of whole tiles"
            raise ScheduleError("let tiles carry a transfer", found, cure)
    moved = (Region(buffer, put.rank, shifted(source.rows, by), source.cols) for source in put.sources)
    return replace(put, sources=tuple(moved))


def announced_by(puts: Mapping[int, list[Put]]) -> Announced:
    """Where among its sender's Puts each signal's stands. puts: of each rank, in launch order."""
    return {
        (notify.rank, notify.pad, notify.signal): place
        for of_rank in puts.values()
        for place, put in enumerate(of_rank)
        for notify in put.notifies
    }


def with_puts(applies: Iterable[Apply], moved: list[tuple[list[Put], Announced]]) -> Iterator[Operation]:
    """A rank's Applies, and in front of each what peers send by the same Puts that it waits for.

    So ranks send alike before they wait, and none waits for what only comes behind its own wait. moved: for each
    tensor, the rank's Puts, and where every signal's stands.
    """
    listed, sent = list(applies), [0] * len(moved)
    for at, apply in enumerate(listed):
        signals = [(apply.rank, wait.pad, one) for wait in apply.all_waits for one in range(*wait.signals)]
        for index, (puts, announced) in enumerate(moved):
            due = [announced[signal] + 1 for signal in signals if signal in announced]
            until = len(puts) if at == len(listed) - 1 else max(due, default=0)
            yield from puts[sent[index] : until]
            sent[index] = max(sent[index], until)
        yield apply
