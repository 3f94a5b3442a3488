"""How `m` rows are dealt to ranks and a shard to pieces: the convention of `torch.chunk`."""

from __future__ import annotations

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
