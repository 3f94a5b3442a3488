"""What the members of a library's collective give one another, share by share or many shares at once.

Shares that lie one below the other are folded: one region stands for all. Among a thousand ranks nearly all regions of
a schedule are such shares, a million of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from msgspec.structs import replace

from overweave.ir.blocks import DEALT
from overweave.ir.library_call import is_permuted
from overweave.ir.schedule import Buffer, Collective, Region, Schedule
from overweave.ir.verify.rules.values import RegionValue, clipped, stacked, summed


def stack_of(regions: tuple[Region, ...]) -> Region | None:
    """The one region that they are, if they have the same rows each and lie one below the other."""
    first, count = regions[0], len(regions)
    top, height = first.rows[0], first.rows[1] - first.rows[0]
    end = top + count * height
    if height <= 0 or [one.rows for one in regions] != list(
        zip(range(top, end, height), range(top + height, end + height, height), strict=True)
    ):
        return None
    if len({(one.buffer, one.rank, one.cols) for one in regions}) > 1:
        return None
    return Region(first.buffer, first.rank, (top, end), first.cols)


def share_of(side: tuple[Region, ...], is_dealt: bool, members: int, at: int) -> tuple[Region, ...]:
    """What a collective's side holds for one member."""
    if not is_dealt:
        return side
    if len(side) == 1:  # folded
        height = side[0].shape[0] // members
        top = side[0].rows[0] + at * height
        return (Region(side[0].buffer, side[0].rank, (top, top + height), side[0].cols),)
    size = max(1, len(side) // members)
    return side[at * size : (at + 1) * size]


def fold(part: Collective, buffers: Mapping[str, Buffer]) -> Collective:
    """The collective with one region for shares that lie one below the other, if no blocks are permuted."""
    if is_permuted(part, buffers):
        return part
    sides = {"sources": part.sources, "destinations": part.destinations}
    for (name, side), is_dealt in zip(tuple(sides.items()), DEALT[part.function], strict=True):
        whole = stack_of(side) if is_dealt and len(side) == len(part.ranks) else None
        if whole is not None:
            sides[name] = (whole,)
    return replace(part, **sides)


def folded(schedule: Schedule) -> Schedule:
    """A well-formed schedule with its collectives folded."""
    buffers = {buffer.name: buffer for buffer in schedule.buffers}
    operations = [fold(one, buffers) if type(one) is Collective else one for one in schedule.operations]
    return replace(schedule, operations=tuple(operations))


class CollectiveExchange:
    """What the members of a collective give one another. read: what each holds in its sources.

    What many members get alike is worked out once.
    """

    def __init__(self, parts: list[Collective], read: list[tuple[RegionValue, ...]]) -> None:
        self.parts, self.read, self.count = parts, read, len(parts)
        self.of_sources, self.of_destinations = DEALT[parts[0].function]
        self.is_folded = self.of_sources and all(len(values) == 1 < self.count for values in read)
        self.sum = cache(lambda at: summed([values[at] for values in read]))
        self.stack = cache(lambda height, cols: stacked([(height, values[0]) for values in read], cols))

    def given(self, giver: int, index: int) -> tuple[RegionValue, ...]:
        """What one member gives to another."""
        values, sources = self.read[giver], self.parts[giver].sources
        if not self.of_sources:
            return values
        if len(values) == 1 < self.count:
            return (self._cut(values[0], sources[0].shape, index),)
        size = len(values) // self.count
        return values[index * size : (index + 1) * size]

    def _cut(self, value: RegionValue, shape: tuple[int, int], index: int) -> RegionValue:
        """A member's share of what is folded."""
        height = shape[0] // self.count
        return clipped(value, (index * height, (index + 1) * height), (0, shape[1]))

    def total(self, index: int, at: int) -> RegionValue:
        """The sum of what all give to a member. Raises Mismatch."""
        if self.is_folded:
            return self._cut(self.sum(at), self.parts[0].sources[0].shape, index)
        if not self.of_sources:
            return self.sum(at)
        return summed([self.given(giver, index)[at] for giver in range(self.count)])

    def landings(self, index: int) -> Iterator[tuple[RegionValue, Region]]:
        """What a member gets, and where it lands."""
        landing = self.parts[index].destinations
        if not self.of_sources and len(landing) == 1 < self.count and all(len(values) == 1 for values in self.read):
            rows, cols = landing[0].shape
            yield self.stack(rows // self.count, cols), landing[0]
            return
        for giver in range(self.count):
            its = share_of(landing, self.of_destinations, self.count, giver)
            yield from zip(self.given(giver, index), its, strict=True)
