"""How a library takes operations that touch permuted blocks: a collective by one call, and nothing else.

The proof and whoever makes the calls, on GPUs and in the emulation, ask the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from overweave.ir.blocks import DEALT, Image, Span, dealt, image_of
from overweave.ir.schedule import Buffer, Collective, Operation, Region

Buffers = Mapping[str, Buffer]


class CollectiveSide(NamedTuple):
    """What a call sends, or what it gets: elements `[lo, hi)` of a buffer's memory, in equal parts, one for each member
    in the order of the group; one part where the members share it."""

    buffer: str
    span: Span
    parts: int

    @property
    def part_size(self) -> int:
        """Elements of a part."""
        return (self.span[1] - self.span[0]) // self.parts


def is_permuted(operation: Operation, buffers: Buffers) -> bool:
    """Whether an operation reads or writes a buffer whose blocks are permuted."""
    names = {part.buffer for part in (*operation.reads, *operation.writes)}  # a few, of up to a million regions
    return any(buffers[name].blocks is not None for name in names if name in buffers)


def image(buffers: Buffers, regions: tuple[Region, ...], by_cells: bool = False) -> Image:
    """The image in memory of regions of one buffer."""
    buffer = buffers[regions[0].buffer]
    parts = tuple((one.rows, one.cols) for one in regions)
    return image_of(buffer.blocks, (buffer.rows, buffer.cols), parts, by_cells)


def library_obstacle(operation: Operation, buffers: Buffers) -> str:
    """Why a library cannot run an operation on permuted blocks; empty if it can, or if there are none."""
    if not is_permuted(operation, buffers):
        return ""
    if not isinstance(operation, Collective):
        return f"a library's {type(operation).__name__} addresses rows and columns, and these blocks are permuted"
    sides = sides_of(operation, buffers)
    return sides if isinstance(sides, str) else ""


def sides_of(part: Collective, buffers: Buffers) -> tuple[CollectiveSide, CollectiveSide] | str:
    """What one call sends and gets for a rank's part of a collective, or why one call cannot do it.

    The call knows a stretch of memory at each side, and cuts it into equal parts by itself.
    """
    if part.finishes:
        return "finishes sums in permuted blocks; finish them where they lie row by row"
    if part.function == "all_reduce" and part.sources != part.destinations:
        return "an all-reduce of permuted blocks adds in place, and this one stores its sums elsewhere"
    of_sources, of_destinations = DEALT[part.function]
    source = _side(part.sources, len(part.ranks) if of_sources else 1, buffers)
    target = _side(part.destinations, len(part.ranks) if of_destinations else 1, buffers)
    if isinstance(source, str) or isinstance(target, str):
        return source if isinstance(source, str) else str(target)
    if source.part_size != target.part_size:
        found = f"sends parts of {source.part_size} elements and gets parts of {target.part_size}"
        return f"its blocks have cells of another size there: it {found}"
    return source, target


def _side(regions: tuple[Region, ...], parts: int, buffers: Buffers) -> CollectiveSide | str:
    """One side, or why it is none."""
    names = {region.buffer for region in regions}
    if len(names) != 1:
        return f"a library call needs one stretch of memory, and this is {len(names)} buffers"
    stretch = image(buffers, regions, by_cells=True).stretch
    if stretch is None:
        return "a library call needs one stretch of memory, and this is none"
    side = CollectiveSide(regions[0].buffer, stretch, parts)
    groups = dealt(regions, parts > 1, parts)
    for at, group in enumerate(groups):
        lo = stretch[0] + at * side.part_size
        if len(groups) != parts or image(buffers, group, by_cells=True).stretch != (lo, lo + side.part_size):
            return f"what it moves for member {at} is not the same part of its stretch: members have {parts} equal ones"
    return side
