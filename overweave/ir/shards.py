"""How `m` rows are dealt to ranks and a shard to pieces: the convention of `torch.chunk`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from overweave.ir.schedule import Range


def shard_rows(m: int, world_size: int, rank: int) -> Range:
    """Rows `[lo, hi)` of `rank`: `ceil(m / world_size)` each until none are left, as `torch.chunk` deals them."""
    size = -(-m // world_size)
    return min(rank * size, m), min((rank + 1) * size, m)


def owned_rows(m: int, world_size: int, rank: int, ranges: int = 1) -> tuple[Range, ...]:
    """The rows of `rank` if each rank has so many ranges, dealt to and fro; neighbours are one.

    One range is that of `shard_rows`. Two are zigzag, the r-th of 2 W from the front and the r-th from the end: then
    attention that looks back only gives all ranks as much to do. SOURCE: Llama 3 (arXiv 2407.21783) 3.3.2.
    """
    found: list[Range] = []
    for turn in range(ranges):
        place = rank if turn % 2 == 0 else world_size - 1 - rank
        lo, hi = shard_rows(m, ranges * world_size, turn * world_size + place)
        if found and found[-1][1] == lo:
            found[-1] = (found[-1][0], hi)
        else:
            found.append((lo, hi))
    return tuple(found)


def strip_rows(m: int, world_size: int, rank: int, strip: int) -> tuple[Range, ...]:
    """The rows of `rank` if bands of `world_size` strips of so many rows are dealt, the r-th strip of each to rank r;
    neighbours are one. The last band has lower strips. Ranks must have equally many rows.
    """
    found: list[Range] = []
    rows = m // world_size
    for first in range(0, rows, strip):
        height = min(strip, rows - first)
        lo = first * world_size + rank * height
        if found and found[-1][1] == lo:
            found[-1] = (found[-1][0], lo + height)
        else:
            found.append((lo, lo + height))
    return tuple(found)


def rows_of(ranges: Iterable[Range]) -> int:
    """How many rows the ranges have together."""
    return sum(hi - lo for lo, hi in ranges)


def piece_rows(rows: Range, pieces: int, alignment: int = 1) -> tuple[Range, ...]:
    """Cuts `rows` into `pieces` ranges of nearly equal multiples of `alignment`; trailing ones may be empty."""
    lo, hi = rows
    units = -(-(hi - lo) // alignment)
    bounds = [min(lo + alignment * (units * piece // pieces), hi) for piece in range(pieces)] + [hi]
    return tuple(zip(bounds, bounds[1:], strict=False))


def tile_parts(rows: Range, tiles: int) -> tuple[Range, ...]:
    """Cuts the rows of a chunk into the parts that its tiles move, of equal height; trailing ones may be empty."""
    lo, hi = rows
    height = -(-(hi - lo) // tiles)
    bounds = [min(lo + height * tile, hi) for tile in range(tiles + 1)]
    return tuple(pairwise(bounds))
