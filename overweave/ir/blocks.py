"""Where the blocks of a buffer lie in memory, if its elements do not lie row by row.

Regions stay logical: rows and columns of the matrix. A permutation of blocks decides which blocks are neighbours in
memory, so that one library call or one copy moves a stretch of memory that holds scattered blocks.
SOURCE: FlashOverlap (arXiv 2504.19519), reordering before and after communication.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Annotated, NamedTuple, TypeVar

from msgspec import Meta, Struct

Part = TypeVar("Part")
Span = tuple[int, int]  # half-open
Rectangle = tuple[Span, Span]  # rows, columns
_Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Place = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Blocks(Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """Blocks of `rows` x `cols` elements, counted row by row, of which the i-th lies at place `places[i]` in memory.

    The elements of a block lie together, row by row. The last blocks of a row or a column may be smaller, and leave no
    hole behind them.
    """

    rows: _Size
    cols: _Size
    places: tuple[_Place, ...]


class Run(NamedTuple):
    """A rectangle of a region, told from the region's corner, whose rows lie `pitch` elements apart from `start` on."""

    row: int
    col: int
    rows: int
    cols: int
    start: int
    pitch: int


def obstacle(blocks: Blocks, shape: tuple[int, int]) -> str | None:
    """Why the places are no bijection of the blocks of a matrix of this shape; None if they are one."""
    count = -(-shape[0] // blocks.rows) * -(-shape[1] // blocks.cols)
    if len(blocks.places) != count:
        return f"names {len(blocks.places)} places for {count} blocks"
    if len(set(blocks.places)) != count or max(blocks.places, default=-1) != count - 1:
        return f"is no bijection of {count} blocks: a place is named twice, or left out"
    return None


def runs_of(blocks: Blocks | None, shape: tuple[int, int], part: Rectangle) -> tuple[Run, ...]:
    """A rectangle of a matrix of this shape as runs of memory, in the order of its blocks."""
    (top, bottom), (left, right) = part
    if blocks is None:
        return (Run(0, 0, bottom - top, right - left, top * shape[1] + left, shape[1]),)
    starts, wide = _starts(blocks, shape), -(-shape[1] // blocks.cols)
    runs: list[Run] = []
    for block_row in range(top // blocks.rows, -(-bottom // blocks.rows)):
        first = block_row * blocks.rows
        lo, hi = max(top, first), min(bottom, first + blocks.rows)
        for block_col in range(left // blocks.cols, -(-right // blocks.cols)):
            begin = block_col * blocks.cols
            pitch = min(blocks.cols, shape[1] - begin)
            low, high = max(left, begin), min(right, begin + blocks.cols)
            start = starts[block_row * wide + block_col] + (lo - first) * pitch + low - begin
            runs.append(Run(lo - top, low - left, hi - lo, high - low, start, pitch))
    return tuple(runs)


@lru_cache(maxsize=32)
def _starts(blocks: Blocks, shape: tuple[int, int]) -> tuple[int, ...]:
    """The element at which each block begins, in the order of the blocks."""
    wide, sizes = -(-shape[1] // blocks.cols), [0] * len(blocks.places)
    for number, place in enumerate(blocks.places):
        row, col = number // wide * blocks.rows, number % wide * blocks.cols
        sizes[place] = min(blocks.rows, shape[0] - row) * min(blocks.cols, shape[1] - col)
    firsts = list(accumulate(sizes, initial=0))
    return tuple(firsts[place] for place in blocks.places)


class Image(NamedTuple):
    """What rectangles of a buffer are in memory. stretch: the elements `[lo, hi)` if they lie without a gap, else None.

    order: which element of which rectangle lies at which distance from the first. Stretches of equal order hold the
    same elements at the same distances, whatever their buffers are.
    """

    stretch: Span | None
    order: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1 << 12)
def image_of(blocks: Blocks | None, shape: tuple[int, int], parts: tuple[Rectangle, ...]) -> Image:
    """The image in memory of rectangles of a matrix of this shape."""
    runs = [(at, run) for at, part in enumerate(parts) for run in runs_of(blocks, shape, part) if run.rows and run.cols]
    runs.sort(key=lambda one: one[1].start)
    lo = end = runs[0][1].start if runs else 0
    is_whole = True
    order: list[tuple[int, ...]] = []
    for at, run in runs:
        is_whole &= run.start == end and (run.rows == 1 or run.pitch == run.cols)
        end = run.start + run.rows * run.cols
        last = order[-1] if order else None
        if last and (at, run.row - last[3], run.col, run.cols) == (last[0], last[1], last[2], last[4]):
            order[-1] = (*last[:3], last[3] + run.rows, *last[4:])  # the next rows of the same columns
        else:
            order.append((at, run.row, run.col, run.rows, run.cols, run.start - lo))
    return Image((lo, end) if is_whole else None, tuple(order))


DEALT: dict[str, tuple[bool, bool]] = {
    "all_gather": (False, True),
    "reduce_scatter": (True, False),
    "all_reduce": (False, False),
    "all_to_all": (True, True),
}


def dealt(parts: tuple[Part, ...], is_dealt: bool, members: int) -> list[tuple[Part, ...]]:
    """The parts of a collective's side by member, as many for each; as one group if members share them."""
    size = max(1, len(parts) // members if is_dealt else len(parts))
    return [parts[first : first + size] for first in range(0, len(parts), size)]
