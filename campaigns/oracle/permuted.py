"""Where the elements of permuted blocks lie, as the judge of verify sees it, sharing no code with it."""

from __future__ import annotations

from overweave.ir.schedule import Buffer, Region


class Malformed(Exception):
    """There is nothing to run: a name, a rank, an index or a shape makes no sense."""


def positions_of(buffer: Buffer) -> list[list[int]]:
    """By row and column, how far each element lies from the buffer's first. Two may share a place."""
    blocks = buffer.blocks
    if blocks is None:
        return [list(range(row * buffer.cols, (row + 1) * buffer.cols)) for row in range(buffer.rows)]
    tops = list(blocks.tops or range(0, buffer.rows, blocks.rows))
    wide = -(-buffer.cols // blocks.cols)
    positions: list[list[int]] = []
    for row in range(buffer.rows):
        above = [top for top in tops if top <= row]
        if not above or row - above[-1] >= blocks.rows:
            raise Malformed(f"row {row} of {buffer.name} is in no block")
        first = (len(above) - 1) * wide
        cells = [place_of(buffer, first + col // blocks.cols) for col in range(buffer.cols)]
        positions.append(
            [(cell * blocks.rows + row - above[-1]) * blocks.cols + col % blocks.cols for col, cell in enumerate(cells)]
        )
    return positions


def place_of(buffer: Buffer, block: int) -> int:
    places = buffer.blocks.places if buffer.blocks else ()
    if not (block < len(places) and 0 <= places[block] < len(places)):
        raise Malformed(f"block {block} of {buffer.name} has no cell")
    return places[block]


def extent_of(buffer: Buffer) -> int:
    """Elements that a buffer takes, padding too."""
    blocks = buffer.blocks
    return len(blocks.places) * blocks.rows * blocks.cols if blocks else buffer.rows * buffer.cols


def moved_by(buffer: Buffer, region: Region) -> list[int]:
    """The elements of a buffer's memory that a library's call takes for a region, with padding: of a block of which it
    has whole rows from the first on, or down to the last, all to the end of the cell."""
    blocks, positions, (left, right) = buffer.blocks, positions_of(buffer), region.cols
    named = [row[left:right] for row in positions[slice(*region.rows)]]
    if blocks is None or not named or left == right:
        return [position for row in named for position in row]
    tops = list(blocks.tops or range(0, buffer.rows, blocks.rows))
    found: list[int] = []
    for top, end in zip(tops, [*tops[1:], buffer.rows], strict=True):
        first, last = max(top, region.rows[0]), min(end, region.rows[1])
        for lo in range(0, buffer.cols, blocks.cols) if first < last else ():
            low, high = max(lo, left), min(lo + blocks.cols, buffer.cols, right)
            is_wide = (low, high) == (lo, min(lo + blocks.cols, buffer.cols))
            if low < high and is_wide:
                start = positions[first][low]
                is_to_end = first == top or last == end
                rows = blocks.rows - (first - top) if is_to_end else last - first
                found += range(start, start + rows * blocks.cols)
            elif low < high:
                found += [position for row in positions[first:last] for position in row[low:high]]
    return found


def stretch_of(buffers: dict[str, Buffer], regions: tuple[Region, ...], rank: int) -> tuple[str, range]:
    """The one stretch of a buffer's memory that a call takes for regions. Raises Malformed if it is none."""
    if len({region.buffer for region in regions}) != 1 or any(region.rank != rank for region in regions):
        raise Malformed("a call takes one buffer of its rank at a side")
    buffer = buffers[regions[0].buffer]
    moved = sorted(position for region in regions for position in moved_by(buffer, region))
    if not moved or moved != list(range(moved[0], moved[-1] + 1)):
        raise Malformed("a call takes one stretch of memory at a side")
    return buffer.name, range(moved[0], moved[-1] + 1)
