"""Where the elements of permuted blocks lie, as the judge of verify sees it, sharing no code with it."""

from __future__ import annotations

from overweave.ir.schedule import Buffer


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


def offsets_in(stretch: list[int], taken: set[int]) -> list[int]:
    """How far elements lie from the first of them. taken: elements that are no padding: a stretch leaves none out."""
    if len(set(stretch)) < len(stretch):
        raise Malformed("a collective names an element twice")
    named, lo, hi = set(stretch), min(stretch, default=0), max(stretch, default=-1)
    if any(element in taken and element not in named for element in range(lo, hi)):
        raise Malformed("a collective leaves out elements between those that it names")
    return sorted(element - lo for element in stretch)
