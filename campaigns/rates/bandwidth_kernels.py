"""A kernel that computes nothing, and leaves what programs carry between their tiles."""

import triton
import triton.language as tl

from overweave.lang.tile_table import claim_tile, push_slices


@triton.jit
def carry_kernel(table, claims, targets, source, tiles, slices, BULK: tl.constexpr):
    """Claims tiles until none is left; before each, moves a slice, as the fused kernels do (compiler/emit/emit.py)."""
    row = claim_tile(claims)
    while row < tiles:
        push_slices(table, row, claims, targets, source, tiles, slices, BULK)
        row = claim_tile(claims)
