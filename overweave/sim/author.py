"""Estimate the time of a tile of an author's kernel from the elements that its directives declare."""

from __future__ import annotations

from itertools import combinations
from math import prod, sqrt

from overweave.hardware.machine import Machine
from overweave.ir.dtype import ITEMSIZE_BYTES, Dtype
from overweave.ir.footprint import Operand, TileSpace
from overweave.sim.cost import tile_us


def estimate_tile_us(machine: Machine, space: TileSpace, dtype: Dtype) -> float:
    """Return microseconds of one tile, every SM busy: the longer of memory time and tensor-core time.

    Memory: all operands are read or written once, in equal parts by all waves. Tensor cores: if the tile reads two
    operands or more, each store is taken for the contraction of the two largest, `[m, k] @ [k, n]`; the three sizes
    give m, n and k. Exact for matmuls, within a small factor for attention; other arithmetic is not modelled.
    """
    reads, writes = ([_elements(space, one) for one in side] for side in (space.loads, space.stores))
    moved = sum(one.rows * one.cols for one in (*space.loads, *space.stores)) * ITEMSIZE_BYTES[dtype]
    waves = max(1, -(-space.tile_count // machine.processor.sms))
    by_memory = moved / machine.hbm.gb_per_s / 1e3 / waves
    if len(reads) < 2 or not all((*reads, *writes)):
        return by_memory
    a, b = max(combinations(reads, 2), key=sum)
    return max(by_memory, sum(_contraction_us(machine, (a, b, out), dtype) for out in writes))


def _contraction_us(machine: Machine, elements: tuple[int, int, int], dtype: Dtype) -> float:
    """Return the time of a contraction. elements: of `a`, `b` and their product, from which m, n and k follow."""
    a, b, out = elements
    m, n, k = (max(1, round(side)) for side in (sqrt(a * out / b), sqrt(b * out / a), sqrt(a * b / out)))
    return tile_us(machine, machine.tile("portable", m, n), (m, n, k), dtype)


def _elements(space: TileSpace, operand: Operand) -> int:
    """Return the elements of an operand that the first tile accesses, over all its loop iterations."""
    first = {axis.name: 0 for axis in space.grid}
    return prod(hi - lo for lo, hi in (space.touched(dim, first) for dim in operand.dims))
