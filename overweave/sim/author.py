"""What a tile of an author's kernel takes, guessed from what its directives say it touches. Better declared."""

from __future__ import annotations

from itertools import combinations
from math import prod, sqrt

from overweave.hardware.machine import Machine
from overweave.ir.dtype import ITEMSIZE_BYTES, Dtype
from overweave.ir.footprint import Operand, TileSpace
from overweave.sim.cost import tile_us


def guessed_tile_us(machine: Machine, space: TileSpace, dtype: Dtype) -> float:
    """Microseconds of one tile, every SM busy: the longer of what memory and tensor cores need.

    Memory: all operands once, whole, and a wave its share of that. Tensor cores: where it reads two operands or more,
    each store is taken for the contraction of the two largest, `[m, k] @ [k, n]`; the three sizes give m, n and k.
    Exact for matmuls, within a small factor for attention; nothing is known of other arithmetic.
    """
    reads, writes = ([_touched(space, one) for one in side] for side in (space.loads, space.stores))
    moved = sum(one.rows * one.cols for one in (*space.loads, *space.stores)) * ITEMSIZE_BYTES[dtype]
    waves = max(1, -(-space.tile_count // machine.processor.sms))
    by_memory = moved / machine.hbm.gb_per_s / 1e3 / waves
    if len(reads) < 2 or not all((*reads, *writes)):
        return by_memory
    a, b = max(combinations(reads, 2), key=sum)
    return max(by_memory, sum(_contraction_us(machine, (a, b, out), dtype) for out in writes))


def _contraction_us(machine: Machine, elements: tuple[int, int, int], dtype: Dtype) -> float:
    """elements: of `a`, `b` and their product, which make up `m`, `n` and `k`."""
    a, b, out = elements
    m, n, k = (max(1, round(side)) for side in (sqrt(a * out / b), sqrt(b * out / a), sqrt(a * b / out)))
    return tile_us(machine, machine.tile("portable", m, n), (m, n, k), dtype)


def _touched(space: TileSpace, operand: Operand) -> int:
    """Elements of an operand that the first tile touches; all that its loops walk."""
    first = {axis.name: 0 for axis in space.grid}
    return prod(hi - lo for lo, hi in (space.touched(dim, first) for dim in operand.dims))
