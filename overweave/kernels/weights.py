"""Whose a tile is, where a launch multiplies by several weights: written once for both matmul kernels."""

import triton
import triton.language as tl

from overweave.lang.tile_table import COLUMNS, WEIGHT


@triton.jit
def weight_of(table, tile, WEIGHTS: tl.constexpr):
    """By which weight the tile multiplies; known without a look where there is one."""
    weight = 0
    if WEIGHTS > 1:
        weight = tl.load(table + tile * COLUMNS + WEIGHT)
    return weight


@triton.jit
def of_weight(weight, first, second, third, WEIGHTS: tl.constexpr):
    """What belongs to a weight: its descriptor, its output, its columns. Those beyond WEIGHTS are None."""
    chosen = first
    if WEIGHTS > 1:
        if weight == 1:
            chosen = second
    if WEIGHTS > 2:
        if weight == 2:
            chosen = third
    return chosen


@triton.jit
def columns_before(weight, n, n_1, WEIGHTS: tl.constexpr):
    """How many columns the weights before this one have: where its own begin among all of them."""
    before = 0
    if WEIGHTS > 1:
        before += tl.where(weight > 0, n, 0)
    if WEIGHTS > 2:
        before += tl.where(weight > 1, n_1, 0)
    return before // 8 * 8  # rows of all weights are whole 16 bytes: rounded, it is known to be a multiple
