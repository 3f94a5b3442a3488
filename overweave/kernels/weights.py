"""Whose a tile is, where a launch multiplies by several weights: written once for both matmul kernels.

WEIGHTS: how many, each an argument; or EXPERTS: as many as there are, of one shape, in one tensor."""

import triton
import triton.language as tl

from overweave.lang.tile_table import COLUMNS, WEIGHT

EXPERTS = tl.constexpr(0)


@triton.jit
def weight_of(table, tile, WEIGHTS: tl.constexpr):
    """By which weight the tile multiplies; known without a look where there is one. A void tile has the first."""
    weight = 0
    if WEIGHTS > 1:
        weight = tl.load(table + tile * COLUMNS + WEIGHT)
    if WEIGHTS == EXPERTS:
        weight = tl.maximum(tl.load(table + tile * COLUMNS + WEIGHT), 0)
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
    if WEIGHTS == EXPERTS:
        before += weight * n
    return before // 8 * 8  # rows of all weights are whole 16 bytes: rounded, it is known to be a multiple
