"""Permuted blocks: buffers whose elements do not lie row by row in memory.

Regions stay logical: rows and columns of the matrix. A permutation of blocks decides which blocks are neighbours in
memory, so that one library call or one copy moves a contiguous span that holds scattered blocks.
SOURCE: FlashOverlap (arXiv 2504.19519), reordering before and after communication.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, NamedTuple, Protocol, TypeVar

from msgspec import Meta, Struct

PartT = TypeVar("PartT")
Span = tuple[int, int]  # half-open
Rectangle = tuple[Span, Span]  # rows, columns
_Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Place = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Blocks(Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True, omit_defaults=True):
    """A permutation of the blocks of a matrix, `rows` x `cols` elements each or less; block i lies in cell `places[i]`.

    Blocks are counted row by row. Memory is a stack of cells `[rows, cols]`, one for each block; the elements of a
    block lie row by row from the first of its cell. If a block is smaller than its cell, the rest of the cell is
    padding, which is never read. tops: the first row of each block of a column, ascending from 0, if blocks are not all
    `rows` high.
    """

    rows: _Size
    cols: _Size
    places: tuple[_Place, ...]
    tops: tuple[_Place, ...] = ()

    @property
    def stack(self) -> tuple[int, int]:
        """Return rows and columns of the memory: all cells, one below the other."""
        return len(self.places) * self.rows, self.cols


class ContiguousRun(NamedTuple):
    """A rectangle relative to its region's corner. In memory its rows begin at `start`, `pitch` elements apart."""

    row: int
    col: int
    rows: int
    cols: int
    start: int
    pitch: int


class Matrix(Protocol):
    """A buffer, or what has the same three fields."""

    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def blocks(self) -> Blocks | None: ...


def stored_shape(buffer: Matrix) -> tuple[int, int]:
    """Return rows and columns of a buffer's memory: its own, or those of the stack of its blocks' cells."""
    return buffer.blocks.stack if buffer.blocks else (buffer.rows, buffer.cols)


def block_tops(blocks: Blocks, rows: int) -> Sequence[int]:
    """Return the first row of each block in a matrix of `rows` rows."""
    return blocks.tops or range(0, rows, blocks.rows)


def permutation_obstacle(blocks: Blocks, shape: tuple[int, int]) -> str | None:
    """Return why `places` is not a bijection of the blocks of a matrix of this shape; None if it is."""
    tops = block_tops(blocks, shape[0])  # without a list of its own a file may mean billions: they are only counted
    steps = pairwise((*blocks.tops, shape[0])) if blocks.tops else ()
    if blocks.tops and (tops[0] != 0 or not all(0 < end - top <= blocks.rows for top, end in steps)):
        return f"has blocks that do not begin at ascending rows, {blocks.rows} apart at most, of {shape[0]}"
    count = len(tops) * -(-shape[1] // blocks.cols)
    if len(blocks.places) != count:
        return f"names {len(blocks.places)} places for {count} blocks"
    if len(set(blocks.places)) != count or max(blocks.places, default=-1) != count - 1:
        return f"is no bijection of {count} blocks: a place is named twice, or left out"
    return None


def memory_runs(blocks: Blocks | None, shape: tuple[int, int], part: Rectangle) -> tuple[ContiguousRun, ...]:
    """Return the runs of memory that hold a rectangle of a matrix of this shape, in the order of its blocks."""
    (top, bottom), (left, right) = part
    if blocks is None:
        return (ContiguousRun(0, 0, bottom - top, right - left, top * shape[1] + left, shape[1]),)
    return tuple(_run_of(blocks, cell, (top, left)) for cell in block_cells(blocks, shape, part))


def _run_of(blocks: Blocks, cell: Cell, corner: tuple[int, int]) -> ContiguousRun:
    """Return the run of a cell within a rectangle that has this corner."""
    (lo, hi), (low, high) = cell.rows, cell.cols
    start = cell.start + (lo - cell.block[0][0]) * blocks.cols + low - cell.block[1][0]
    return ContiguousRun(lo - corner[0], low - corner[1], hi - lo, high - low, start, blocks.cols)


class Cell(NamedTuple):
    """The intersection of a rectangle with one block. rows, cols: of the intersection, block: of the whole block, all
    in the matrix. start: where the block's cell begins in memory."""

    rows: Span
    cols: Span
    block: Rectangle
    start: int


def block_cells(blocks: Blocks, shape: tuple[int, int], part: Rectangle) -> list[Cell]:
    """Return the intersections of a rectangle of a matrix of this shape with each block, block by block."""
    (top, bottom), (left, right) = part
    tops, wide, size = block_tops(blocks, shape[0]), -(-shape[1] // blocks.cols), blocks.rows * blocks.cols
    columns: list[tuple[int, Span, Span]] = []  # which, what is taken of it, the whole
    for col in range(left // blocks.cols, -(-right // blocks.cols)):
        begin, stop = col * blocks.cols, min((col + 1) * blocks.cols, shape[1])
        columns.append((col, (max(left, begin), min(right, stop)), (begin, stop)))
    cells: list[Cell] = []
    for index in range(bisect_right(tops, top) - 1 if bottom > top else len(tops), len(tops)):
        first, end = tops[index], tops[index + 1] if index + 1 < len(tops) else shape[0]
        if first >= bottom:
            break
        rows, whole = (max(top, first), min(bottom, end)), (first, end)
        places = blocks.places[index * wide : (index + 1) * wide]
        cells += [Cell(rows, cols, (whole, block), places[col] * size) for col, cols, block in columns]
    return cells


class Image(NamedTuple):
    """How rectangles of a buffer lie in memory.

    span: the elements `[lo, hi)` if the rectangles lie there with only padding between them, else None. order: one
    tuple for each run: rectangle, row, column, rows, columns, offset from `lo`, and the pitch of its rows. Images of
    equal order hold the same elements at the same offsets, whatever their buffers are. extra: rows of blocks that lie
    within the span and are not in the rectangles, as rectangles of the matrix.
    """

    span: Span | None
    order: tuple[tuple[int, ...], ...]
    extra: tuple[Rectangle, ...] = ()


@lru_cache(maxsize=1 << 12)
def memory_image(
    blocks: Blocks | None, shape: tuple[int, int], parts: tuple[Rectangle, ...], by_cells: bool = False
) -> Image:
    """Return the image in memory of rectangles of a matrix of this shape. by_cells: a rectangle that holds the first
    rows of a block has its whole cell, as where a last shard is a few rows shorter than the others."""
    pieces = [
        piece for rectangle, part in enumerate(parts) for piece in _pieces(blocks, shape, (rectangle, part), by_cells)
    ]
    pieces.sort(key=lambda one: one.run.start)
    lo = end = pieces[0].run.start if pieces else 0
    is_whole = True
    order: list[tuple[int, ...]] = []
    for rectangle, run, stop, _ in pieces:
        is_whole &= run.start == end and stop > 0
        end = stop
        last, pitch = order[-1] if order else None, run.pitch if run.rows > 1 else 0
        if last and _follows(last, rectangle, run, lo):
            order[-1] = (*last[:3], last[3] + run.rows, *last[4:6], run.pitch)  # the next rows of the same columns
        else:
            order.append((rectangle, run.row, run.col, run.rows, run.cols, run.start - lo, pitch))
    extra = tuple(piece.extra for piece in pieces if piece.extra)
    return Image((lo, end) if is_whole else None, tuple(order), extra)


def _follows(last: tuple[int, ...], rectangle: int, run: ContiguousRun, lo: int) -> bool:
    """Whether a run of a rectangle continues the last one: the next rows of the same columns at the same pitch. lo:
    the first element of the image."""
    is_next = (rectangle, run.row - last[3], run.col, run.cols) == (last[0], last[1], last[2], last[4])
    return is_next and last[6] in (0, run.pitch) and run.start - lo == last[5] + last[3] * run.pitch


class _Piece(NamedTuple):
    """A run of rectangle `at`. stop: where it ends in memory, padding included; 0 if it has gaps. extra: rows of its
    block that lie before `stop` and are not in the rectangle."""

    at: int
    run: ContiguousRun
    stop: int
    extra: Rectangle | None


def _pieces(
    blocks: Blocks | None, shape: tuple[int, int], numbered: tuple[int, Rectangle], by_cells: bool
) -> list[_Piece]:
    """Return the pieces of one rectangle that are not empty. numbered: its index and the rectangle."""
    rectangle, part = numbered
    pieces: list[_Piece] = []
    if blocks is None:
        runs: list[tuple[ContiguousRun, Cell | None]] = [(run, None) for run in memory_runs(blocks, shape, part)]
    else:
        cells, corner = block_cells(blocks, shape, part), (part[0][0], part[1][0])
        runs = [(_run_of(blocks, cell, corner), cell) for cell in cells]
    for run, cell in runs:
        if not run.rows or not run.cols:
            continue
        stop, extra = run.start + (run.rows - 1) * run.pitch + run.cols, None
        is_wide = run.cols == run.pitch if cell is None else cell.cols == cell.block[1]
        if not is_wide:
            stop = stop if run.rows == 1 else 0
        elif blocks is not None and cell is not None:
            (first, end), (_, row_end) = cell.block[0], cell.rows
            if row_end == end or (by_cells and cell.rows[0] == first):
                stop = cell.start + blocks.rows * blocks.cols
                extra = ((row_end, end), cell.block[1]) if row_end < end else None
            else:
                stop = run.start + run.rows * run.pitch
        pieces.append(_Piece(rectangle, run, stop, extra))
    return pieces


# function -> whether its sources, and its destinations, are one share for each member
CUT_BY_MEMBER: dict[str, tuple[bool, bool]] = {
    "all_gather": (False, True),
    "reduce_scatter": (True, False),
    "all_reduce": (False, False),
    "all_to_all": (True, True),
}


def regions_by_member(parts: tuple[PartT, ...], is_per_member: bool, members: int) -> list[tuple[PartT, ...]]:
    """Group the regions of one side of a collective by member: equally many for each, or one group for all.
    is_per_member: whether each member has regions of its own (CUT_BY_MEMBER)."""
    size = max(1, len(parts) // members if is_per_member else len(parts))
    return [parts[first : first + size] for first in range(0, len(parts), size)]
