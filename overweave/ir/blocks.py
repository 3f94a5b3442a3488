"""Where the blocks of a buffer lie in memory, if its elements do not lie row by row.

Regions stay logical: rows and columns of the matrix. A permutation of blocks decides which blocks are neighbours in
memory, so that one library call or one copy moves a stretch of memory that holds scattered blocks.
SOURCE: FlashOverlap (arXiv 2504.19519), reordering before and after communication.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple, Protocol, TypeVar

from msgspec import Meta, Struct

PartT = TypeVar("PartT")
Span = tuple[int, int]  # half-open
Rectangle = tuple[Span, Span]  # rows, columns
_Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Place = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Blocks(Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True, omit_defaults=True):
    """Blocks of at most `rows` x `cols` elements, counted row by row, of which the i-th lies in cell `places[i]`.

    Memory is a stack of cells `[rows, cols]`, one for each block; the elements of a block lie row by row from its
    cell's first on. What a smaller block leaves of its cell is padding, which nobody reads. tops: the rows at which the
    blocks of a column begin, ascending from 0, where these are no multiples of `rows`.
    """

    rows: _Size
    cols: _Size
    places: tuple[_Place, ...]
    tops: tuple[_Place, ...] = ()

    @property
    def stack(self) -> tuple[int, int]:
        """Rows and columns of the memory: all cells, one below the other."""
        return len(self.places) * self.rows, self.cols


class ContiguousRun(NamedTuple):
    """A rectangle of a region, told from the region's corner, whose rows lie `pitch` elements apart from `start` on."""

    row: int
    col: int
    rows: int
    cols: int
    start: int
    pitch: int


class Matrix(Protocol):
    """A buffer."""

    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def blocks(self) -> Blocks | None: ...


def stored_shape(buffer: Matrix) -> tuple[int, int]:
    """Rows and columns of a buffer's memory: its own, or those of the stack of its blocks' cells."""
    return buffer.blocks.stack if buffer.blocks else (buffer.rows, buffer.cols)


def tops_of(blocks: Blocks, rows: int) -> Sequence[int]:
    """The rows of a matrix of so many at which its blocks begin."""
    return blocks.tops or range(0, rows, blocks.rows)


def obstacle(blocks: Blocks, shape: tuple[int, int]) -> str | None:
    """Why the places are no bijection of the blocks of a matrix of this shape; None if they are one."""
    tops = tops_of(blocks, shape[0])
    heights = [end - top for top, end in zip(tops, (*tops[1:], shape[0]), strict=True)]
    if blocks.tops and (tops[0] != 0 or not all(0 < height <= blocks.rows for height in heights)):
        return f"has blocks that do not begin at ascending rows, {blocks.rows} apart at most, of {shape[0]}"
    count = len(tops) * -(-shape[1] // blocks.cols)
    if len(blocks.places) != count:
        return f"names {len(blocks.places)} places for {count} blocks"
    if len(set(blocks.places)) != count or max(blocks.places, default=-1) != count - 1:
        return f"is no bijection of {count} blocks: a place is named twice, or left out"
    return None


def runs_of(blocks: Blocks | None, shape: tuple[int, int], part: Rectangle) -> tuple[ContiguousRun, ...]:
    """A rectangle of a matrix of this shape as runs of memory, in the order of its blocks."""
    (top, bottom), (left, right) = part
    if blocks is None:
        return (ContiguousRun(0, 0, bottom - top, right - left, top * shape[1] + left, shape[1]),)
    return tuple(_run_of(blocks, cell, (top, left)) for cell in cells_of(blocks, shape, part))


def _run_of(blocks: Blocks, cell: Cell, corner: tuple[int, int]) -> ContiguousRun:
    """A cell's part of a rectangle that has this corner."""
    (lo, hi), (low, high) = cell.rows, cell.cols
    start = cell.start + (lo - cell.block[0][0]) * blocks.cols + low - cell.block[1][0]
    return ContiguousRun(lo - corner[0], low - corner[1], hi - lo, high - low, start, blocks.cols)


class Cell(NamedTuple):
    """What a rectangle takes of one block. rows, cols: of the matrix. block: the whole block's. start: its cell's."""

    rows: Span
    cols: Span
    block: Rectangle
    start: int


def cells_of(blocks: Blocks, shape: tuple[int, int], part: Rectangle) -> list[Cell]:
    """What a rectangle of a matrix of this shape takes of each block, block by block."""
    (top, bottom), (left, right) = part
    tops, wide, size = tops_of(blocks, shape[0]), -(-shape[1] // blocks.cols), blocks.rows * blocks.cols
    columns: list[tuple[int, Span, Span]] = []  # which, what is taken of it, the whole
    for col in range(left // blocks.cols, -(-right // blocks.cols)):
        begin, stop = col * blocks.cols, min((col + 1) * blocks.cols, shape[1])
        columns.append((col, (max(left, begin), min(right, stop)), (begin, stop)))
    found: list[Cell] = []
    for at in range(bisect_right(tops, top) - 1 if bottom > top else len(tops), len(tops)):
        first, end = tops[at], tops[at + 1] if at + 1 < len(tops) else shape[0]
        if first >= bottom:
            break
        rows, whole = (max(top, first), min(bottom, end)), (first, end)
        places = blocks.places[at * wide : (at + 1) * wide]
        found += [Cell(rows, cols, (whole, block), places[col] * size) for col, cols, block in columns]
    return found


class Image(NamedTuple):
    """What rectangles of a buffer are in memory. stretch: the elements `[lo, hi)` if they lie with nothing but padding
    between them, else None. order: which element of which rectangle lies at which distance from the first: rectangle,
    row, column, rows, columns, distance, and how far its rows lie apart. Stretches of equal order hold the same
    elements at the same distances, whatever their buffers are. rest: rows of blocks that lie within the stretch and are
    no part of the rectangles, as rectangles of the matrix.
    """

    stretch: Span | None
    order: tuple[tuple[int, ...], ...]
    rest: tuple[Rectangle, ...] = ()


@lru_cache(maxsize=1 << 12)
def image_of(
    blocks: Blocks | None, shape: tuple[int, int], parts: tuple[Rectangle, ...], by_cells: bool = False
) -> Image:
    """The image in memory of rectangles of a matrix of this shape. by_cells: a rectangle that has the first rows of a
    block has its whole cell, as where a last shard is a few rows shorter than the others.
    """
    pieces = [piece for at, part in enumerate(parts) for piece in _pieces(blocks, shape, (at, part), by_cells)]
    pieces.sort(key=lambda one: one.run.start)
    lo = end = pieces[0].run.start if pieces else 0
    is_whole = True
    order: list[tuple[int, ...]] = []
    for at, run, stop, _ in pieces:
        is_whole &= run.start == end and stop > 0
        end = stop
        last, pitch = order[-1] if order else None, run.pitch if run.rows > 1 else 0
        if last and _follows(last, at, run, lo):
            order[-1] = (*last[:3], last[3] + run.rows, *last[4:6], run.pitch)  # the next rows of the same columns
        else:
            order.append((at, run.row, run.col, run.rows, run.cols, run.start - lo, pitch))
    rest = tuple(piece.rest for piece in pieces if piece.rest)
    return Image((lo, end) if is_whole else None, tuple(order), rest)


def _follows(last: tuple[int, ...], at: int, run: ContiguousRun, lo: int) -> bool:
    """Whether a run of rectangle `at` has the next rows of the same columns, as far apart. lo: of the image."""
    is_next = (at, run.row - last[3], run.col, run.cols) == (last[0], last[1], last[2], last[4])
    return is_next and last[6] in (0, run.pitch) and run.start - lo == last[5] + last[3] * run.pitch


class _Piece(NamedTuple):
    """A run of rectangle `at`. stop: where it ends in memory, with the padding behind it; 0 if it has gaps. rest: rows
    of its block that are none of its own and lie before that end."""

    at: int
    run: ContiguousRun
    stop: int
    rest: Rectangle | None


def _pieces(
    blocks: Blocks | None, shape: tuple[int, int], numbered: tuple[int, Rectangle], by_cells: bool
) -> list[_Piece]:
    """The runs of one rectangle that hold anything."""
    at, part = numbered
    found: list[_Piece] = []
    if blocks is None:
        runs: list[tuple[ContiguousRun, Cell | None]] = [(run, None) for run in runs_of(blocks, shape, part)]
    else:
        cells, corner = cells_of(blocks, shape, part), (part[0][0], part[1][0])
        runs = [(_run_of(blocks, cell, corner), cell) for cell in cells]
    for run, cell in runs:
        if not run.rows or not run.cols:
            continue
        stop, rest = run.start + (run.rows - 1) * run.pitch + run.cols, None
        is_wide = run.cols == run.pitch if cell is None else cell.cols == cell.block[1]
        if not is_wide:
            stop = stop if run.rows == 1 else 0
        elif blocks is not None and cell is not None:
            (first, end), (_, taken) = cell.block[0], cell.rows
            if taken == end or (by_cells and cell.rows[0] == first):
                stop = cell.start + blocks.rows * blocks.cols
                rest = ((taken, end), cell.block[1]) if taken < end else None
            else:
                stop = run.start + run.rows * run.pitch
        found.append(_Piece(at, run, stop, rest))
    return found


DEALT: dict[str, tuple[bool, bool]] = {
    "all_gather": (False, True),
    "reduce_scatter": (True, False),
    "all_reduce": (False, False),
    "all_to_all": (True, True),
}


def dealt(parts: tuple[PartT, ...], is_dealt: bool, members: int) -> list[tuple[PartT, ...]]:
    """The parts of a collective's side by member, as many for each; as one group if members share them."""
    size = max(1, len(parts) // members if is_dealt else len(parts))
    return [parts[first : first + size] for first in range(0, len(parts), size)]
