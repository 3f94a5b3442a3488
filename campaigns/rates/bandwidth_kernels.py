"""A kernel whose tiles compute nothing: what is left are the slices that its programs carry between them."""

import triton
import triton.language as tl

from overweave.lang.tile_table import carry_slices, claim_tile


@triton.jit
def carry_kernel(table, claims, targets, source, tiles, slices, BULK: tl.constexpr):
    """Claims tiles until none is left; before each, moves a slice, as the fused kernels do (compiler/emit/emit.py)."""
    row = claim_tile(claims)
    while row < tiles:
        carry_slices(table, row, claims, targets, source, tiles, slices, BULK)
        row = claim_tile(claims)
