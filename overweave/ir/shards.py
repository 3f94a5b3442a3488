"""How `m` rows are split into shards of ranks, and a shard into pieces: the convention of `torch.chunk`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from overweave.ir.schedule import Range


def shard_rows(m: int, world_size: int, rank: int) -> Range:
    """Return the rows `[lo, hi)` of `rank`: `ceil(m / world_size)` each until none are left, as `torch.chunk` splits
    them."""
    size = -(-m // world_size)
    return min(rank * size, m), min((rank + 1) * size, m)


def owned_rows(m: int, world_size: int, rank: int, ranges: int = 1) -> tuple[Range, ...]:
    """Return the rows of `rank` if each rank has `ranges` ranges, assigned in alternating directions; neighbours are
    merged.

    One range is that of `shard_rows`. Two are zigzag: of 2 W ranges the r-th from the front and the r-th from the end.
    Then causal attention is as much work for every rank.
    SOURCE: Llama 3 (arXiv 2407.21783) 3.3.2.
    """
    owned: list[Range] = []
    for index in range(ranges):
        place = rank if index % 2 == 0 else world_size - 1 - rank
        lo, hi = shard_rows(m, ranges * world_size, index * world_size + place)
        if owned and owned[-1][1] == lo:
            owned[-1] = (owned[-1][0], hi)
        else:
            owned.append((lo, hi))
    return tuple(owned)


def strip_rows(m: int, world_size: int, rank: int, strip: int) -> tuple[Range, ...]:
    """Return the block-cyclic rows of `rank`: the r-th strip of every band of `world_size` strips of so many rows.
    Neighbours are merged. The last band has lower strips. Ranks must have equally many rows."""
    owned: list[Range] = []
    rows = m // world_size
    for first in range(0, rows, strip):
        height = min(strip, rows - first)
        lo = first * world_size + rank * height
        if owned and owned[-1][1] == lo:
            owned[-1] = (owned[-1][0], lo + height)
        else:
            owned.append((lo, lo + height))
    return tuple(owned)


def rows_of(ranges: Iterable[Range]) -> int:
    return sum(hi - lo for lo, hi in ranges)


def piece_rows(rows: Range, pieces: int, alignment: int = 1) -> tuple[Range, ...]:
    """Return `pieces` ranges of `rows`, nearly equal multiples of `alignment`; trailing ones may be empty."""
    lo, hi = rows
    units = -(-(hi - lo) // alignment)
    bounds = [min(lo + alignment * (units * piece // pieces), hi) for piece in range(pieces)] + [hi]
    return tuple(zip(bounds, bounds[1:], strict=False))


def tile_parts(rows: Range, tiles: int) -> tuple[Range, ...]:
    """Return the rows of a chunk that each of its tiles moves, of equal height; trailing ranges may be empty."""
    lo, hi = rows
    height = -(-(hi - lo) // tiles)
    bounds = [min(lo + height * tile, hi) for tile in range(tiles + 1)]
    return tuple(pairwise(bounds))
