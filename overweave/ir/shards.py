"""How `m` rows are dealt to ranks and a shard to pieces: the convention of `torch.chunk`."""

from __future__ import annotations

from itertools import pairwise

from overweave.ir.schedule import Range


def shard_rows(m: int, world_size: int, rank: int) -> Range:
    """Rows `[lo, hi)` of `rank`: `ceil(m / world_size)` each until none are left, as `torch.chunk` deals them."""
    size = -(-m // world_size)
    return min(rank * size, m), min((rank + 1) * size, m)


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
