"""Kernels that compute nothing: one that leaves what programs carry between their tiles, one that takes the time."""

import triton
import triton.language as tl

from overweave.lang.tile_table import claim_tile, push_slices, read_clock


@triton.jit
def carry_kernel(table, claims, targets, source, tiles, slices, BULK: tl.constexpr):
    """Claims tiles until none is left; before each, moves a slice, as the fused kernels do (compiler/emit/emit.py)."""
    row = claim_tile(claims)
    while row < tiles:
        push_slices(table, row, claims, targets, source, tiles, slices, BULK)
        row = claim_tile(claims)


@triton.jit
def stamp_kernel(times, AT: tl.constexpr):
    """Writes down the device's clock."""
    tl.store(times + AT, read_clock())
