"""Collectives of NCCL or gloo on buffers of permuted blocks: which of them one call can run, on which memory.

The verifier, the launcher on GPUs and the emulation on CPUs call the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from overweave.ir.blocks import CUT_BY_MEMBER, Image, Span, memory_image, regions_by_member
from overweave.ir.schedule import Buffer, Collective, Operation, Region

Buffers = Mapping[str, Buffer]


class CollectiveSide(NamedTuple):
    """What a collective call sends or receives: elements `[lo, hi)` of a buffer's memory, in equal parts. parts: one
    for each member, in the order of the group; 1 if the members share it."""

    buffer: str
    span: Span
    parts: int

    @property
    def part_size(self) -> int:
        return (self.span[1] - self.span[0]) // self.parts


def is_permuted(operation: Operation, buffers: Buffers) -> bool:
    """Whether an operation reads or writes a buffer whose blocks are permuted."""
    names = {part.buffer for part in (*operation.reads, *operation.writes)}  # a few, of up to a million regions
    return any(buffers[name].blocks is not None for name in names if name in buffers)


def image_of_regions(buffers: Buffers, regions: tuple[Region, ...], by_cells: bool = False) -> Image:
    buffer = buffers[regions[0].buffer]
    parts = tuple((one.rows, one.cols) for one in regions)
    return memory_image(buffer.blocks, (buffer.rows, buffer.cols), parts, by_cells)


def library_obstacle(operation: Operation, buffers: Buffers) -> str:
    """Return why torch or NCCL cannot run an operation on permuted blocks; "" if it can, or touches none."""
    if not is_permuted(operation, buffers):
        return ""
    if not isinstance(operation, Collective):
        return f"a library's {type(operation).__name__} addresses rows and columns, and these blocks are permuted"
    sides = call_sides(operation, buffers)
    return sides if isinstance(sides, str) else ""


def call_sides(part: Collective, buffers: Buffers) -> tuple[CollectiveSide, CollectiveSide] | str:
    """Return what one library call sends and receives for a rank's part of a collective of permuted blocks, or why one
    call cannot do it. The call takes one contiguous span of memory at each side, and cuts it into equal parts."""
    if part.finishes:
        return "finishes sums in permuted blocks; finish them where they lie row by row"
    if part.function == "all_reduce" and part.sources != part.destinations:
        return "an all-reduce of permuted blocks adds in place, and this one stores its sums elsewhere"
    of_sources, of_destinations = CUT_BY_MEMBER[part.function]
    source = _side(part.sources, len(part.ranks) if of_sources else 1, buffers)
    target = _side(part.destinations, len(part.ranks) if of_destinations else 1, buffers)
    if isinstance(source, str) or isinstance(target, str):
        return source if isinstance(source, str) else str(target)
    if source.part_size != target.part_size:
        sizes = f"sends parts of {source.part_size} elements and gets parts of {target.part_size}"
        return f"its blocks are padded to another size at the destination: it {sizes}"
    return source, target


def _side(regions: tuple[Region, ...], parts: int, buffers: Buffers) -> CollectiveSide | str:
    """Return one side of the call, or why the regions cannot be one."""
    names = {region.buffer for region in regions}
    if len(names) != 1:
        return f"a library call needs one contiguous span, and these are {len(names)} buffers"
    span = image_of_regions(buffers, regions, by_cells=True).span
    if span is None:
        return "a library call needs one contiguous span, and its regions are not"
    side = CollectiveSide(regions[0].buffer, span, parts)
    groups = regions_by_member(regions, parts > 1, parts)
    for member, group in enumerate(groups):
        lo = span[0] + member * side.part_size
        if len(groups) != parts or image_of_regions(buffers, group, by_cells=True).span != (lo, lo + side.part_size):
            return (
                f"what it moves for member {member} is not the same part of its span: members have {parts} equal ones"
            )
    return side
