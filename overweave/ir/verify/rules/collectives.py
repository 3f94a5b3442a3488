"""The values that the members of a collective send one another, share by share or many shares at once.

Shares that lie one below the other are folded: one region stands for all. At a thousand ranks nearly all regions of a
schedule are such shares, a million of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from msgspec.structs import replace

from overweave.ir.blocks import CUT_BY_MEMBER
from overweave.ir.library_call import is_permuted
from overweave.ir.schedule import Buffer, Collective, Region, Schedule
from overweave.ir.verify.rules.values import RegionValue, clip, ordered_sum, stack


def stacked_region(regions: tuple[Region, ...]) -> Region | None:
    """Return the one region that equally high regions make up if they lie one below the other, else None."""
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


def share_of(side: tuple[Region, ...], is_per_member: bool, members: int, member: int) -> tuple[Region, ...]:
    """Return the regions of a collective's side for one member."""
    if not is_per_member:
        return side
    if len(side) == 1:  # folded
        height = side[0].shape[0] // members
        top = side[0].rows[0] + member * height
        return (Region(side[0].buffer, side[0].rank, (top, top + height), side[0].cols),)
    size = max(1, len(side) // members)
    return side[member * size : (member + 1) * size]


def fold(part: Collective, buffers: Mapping[str, Buffer]) -> Collective:
    """Return the collective with one region for shares that lie one below the other, if no blocks are permuted."""
    if is_permuted(part, buffers):
        return part
    sides = {"sources": part.sources, "destinations": part.destinations}
    for (name, side), is_per_member in zip(tuple(sides.items()), CUT_BY_MEMBER[part.function], strict=True):
        whole = stacked_region(side) if is_per_member and len(side) == len(part.ranks) else None
        if whole is not None:
            sides[name] = (whole,)
    return replace(part, **sides)


def fold_collectives(schedule: Schedule) -> Schedule:
    """Return a well-formed schedule with its collectives folded."""
    buffers = {buffer.name: buffer for buffer in schedule.buffers}
    operations = [fold(one, buffers) if type(one) is Collective else one for one in schedule.operations]
    return replace(schedule, operations=tuple(operations))


class CollectiveExchange:
    """The values that members of a collective send one another. read: the values of each member's sources. Values that
    many members get alike are computed once."""

    def __init__(self, parts: list[Collective], read: list[tuple[RegionValue, ...]]) -> None:
        self.parts, self.read, self.count = parts, read, len(parts)
        self.of_sources, self.of_destinations = CUT_BY_MEMBER[parts[0].function]
        self.is_folded = self.of_sources and all(len(values) == 1 < self.count for values in read)
        self.sum = cache(lambda at: ordered_sum([values[at] for values in read]))
        self.stack = cache(lambda height, cols: stack([(height, values[0]) for values in read], cols))

    def share_for(self, sender: int, receiver: int) -> tuple[RegionValue, ...]:
        """Return the values that one member sends to another."""
        values, sources = self.read[sender], self.parts[sender].sources
        if not self.of_sources:
            return values
        if len(values) == 1 < self.count:
            return (self._cut(values[0], sources[0].shape, receiver),)
        size = len(values) // self.count
        return values[receiver * size : (receiver + 1) * size]

    def _cut(self, value: RegionValue, shape: tuple[int, int], member: int) -> RegionValue:
        """Return a member's share of a folded value."""
        height = shape[0] // self.count
        return clip(value, (member * height, (member + 1) * height), (0, shape[1]))

    def total(self, receiver: int, operand: int) -> RegionValue:
        """Return the sum of what all send to a member. Raises Mismatch."""
        if self.is_folded:
            return self._cut(self.sum(operand), self.parts[0].sources[0].shape, receiver)
        if not self.of_sources:
            return self.sum(operand)
        return ordered_sum([self.share_for(sender, receiver)[operand] for sender in range(self.count)])

    def received(self, receiver: int) -> Iterator[tuple[RegionValue, Region]]:
        """Yield each value that a member receives, and the region where it lands."""
        destinations = self.parts[receiver].destinations
        if (
            not self.of_sources
            and len(destinations) == 1 < self.count
            and all(len(values) == 1 for values in self.read)
        ):
            rows, cols = destinations[0].shape
            yield self.stack(rows // self.count, cols), destinations[0]
            return
        for sender in range(self.count):
            regions = share_of(destinations, self.of_destinations, self.count, sender)
            yield from zip(self.share_for(sender, receiver), regions, strict=True)
