"""Which parts of its tensors each tile of a kernel reads and writes, as data: axes, and operands cut along them.

Tiles are numbered in row-major order over the grid axes. Nothing here knows how the kernel computes. The compiler fills
it in from directives, and a schedule is built around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Annotated

from msgspec import Meta, Struct

from overweave.ir.schedule import LIMIT, Name, Range

AxisExtent = Annotated[int, Meta(ge=0, le=LIMIT)]
BlockSize = Annotated[int, Meta(ge=1, le=LIMIT)]


class Axis(Struct, frozen=True, forbid_unknown_fields=True):
    """An axis of `extent` elements, cut into blocks of `block`. is_streamed: a loop inside every tile walks it."""

    name: Name
    extent: AxisExtent
    block: BlockSize
    is_streamed: bool = False

    @property
    def count(self) -> int:
        """How many blocks there are; the last one may be short."""
        return -(-self.extent // self.block)


class Dim(Struct, frozen=True, forbid_unknown_fields=True):
    """A dimension of `extent` elements. A tile that is block `t` of `axis` touches block `scale * t + shift`. axis
    None: every tile touches all of it. is_of_blocks: it has one entry for each block of the axis."""

    extent: AxisExtent
    axis: Name | None = None
    scale: int = 1
    shift: int = 0
    is_of_blocks: bool = False


class Operand(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that the kernel reads or writes, row-major. parameter: the kernel's argument that holds it."""

    tensor: Name
    parameter: Name
    dims: tuple[Dim, ...]

    @property
    def rows(self) -> int:
        """Extent of the first dimension: a matrix `[rows, cols]` is what a schedule sees."""
        return self.dims[0].extent

    @property
    def cols(self) -> int:
        return prod(dim.extent for dim in self.dims[1:])


class TileSpace(Struct, frozen=True, forbid_unknown_fields=True):
    """All tiles of one launch of `kernel`, with the tensors they load and store."""

    kernel: Name
    axes: tuple[Axis, ...]
    loads: tuple[Operand, ...]
    stores: tuple[Operand, ...]

    @property
    def grid(self) -> tuple[Axis, ...]:
        """Return the axes that number the tiles."""
        return tuple(axis for axis in self.axes if not axis.is_streamed)

    @property
    def tile_count(self) -> int:
        return prod(axis.count for axis in self.grid)

    def axis(self, name: str) -> Axis:
        """The axis called `name`. Raises KeyError."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(name)

    def coordinates(self) -> Iterator[dict[str, int]]:
        """Yield for tile 0, 1, 2, ... its block on each axis."""
        names = [axis.name for axis in self.grid]
        for blocks in product(*(range(axis.count) for axis in self.grid)):
            yield dict(zip(names, blocks, strict=True))

    def entries(self, dim: Dim) -> int:
        """Return how many elements of a dimension one block of its axis covers; 1 of an extent."""
        return self.axis(dim.axis).block if dim.axis is not None and not dim.is_of_blocks else 1

    def touched(self, dim: Dim, tile: dict[str, int]) -> Range:
        """Return the elements `[lo, hi)` of a dimension that a tile touches, those of its whole loop if that walks the
        axis."""
        if dim.axis is None or dim.axis not in tile:
            return 0, dim.extent
        block = self.entries(dim)
        lo = (dim.scale * tile[dim.axis] + dim.shift) * block
        return min(max(lo, 0), dim.extent), min(max(lo + block, 0), dim.extent)
