"""The end of a share of a tile's steps of k (`TileRow.shares`): who comes last sums all, in the portable kernel.

A program leaves its products in memory, in fp32, and counts itself in. The one that finds all others there reads every
share in the order of k, its own too, and ends the tile like any other, so that bits do not depend on who came last.
Nobody waits. Counters are left at zero, for the next launch.
"""

import triton
import triton.language as tl

from overweave.lang.tile_table import ARRIVALS, K_HI, K_LO, PARTIAL, SHARE, SHARES, VOID_SHARE, read_column

LEFT_OUT, SUMMED, SUMMED_VOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def k_range(table, tile, k, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """From where to where along k the row multiplies."""
    low = 0
    high = k
    if SPLIT_K:
        if read_column(table, tile, SHARES) > 0:
            low = read_column(table, tile, K_LO, BLOCK_K)
            high = read_column(table, tile, K_HI)
    return low, high


@triton.jit
def end_share(value, gate, HAS_GATE: tl.constexpr, memory, table, tile, verdict):
    """What a row's products are to become, and these: LEFT_OUT, or the sum, of a void share or of none.

    memory: where shares are left and counted (memory/shares.Shares).
    """
    ROWS: tl.constexpr = value.shape[0]
    COLS: tl.constexpr = value.shape[1]
    SIZE: tl.constexpr = ROWS * COLS * (2 if HAS_GATE else 1)
    told = tl.where(verdict == 1, SUMMED, SUMMED_VOID)
    shares = read_column(table, tile, SHARES)
    if shares > 0:
        partial = read_column(table, tile, PARTIAL)
        offsets = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
        first = memory.partials + partial.to(tl.int64) * SIZE + offsets
        own = first + read_column(table, tile, SHARE).to(tl.int64) * SIZE
        tl.store(own, value)
        if HAS_GATE:
            tl.store(own + ROWS * COLS, gate)
        told = arrive(memory.arrivals + partial * ARRIVALS, shares, verdict == 1)
        if told != LEFT_OUT:
            value = _summed(first, SIZE, shares)
            if HAS_GATE:
                gate = _summed(first + ROWS * COLS, SIZE, shares)
    return told, value, gate


@triton.jit
def arrive(counter, shares, is_sound):
    """Counts a share in. LEFT_OUT, or how the tile is to be ended if it came last."""
    more = tl.where(is_sound, 1, 1 + VOID_SHARE)
    tl.debug_barrier()  # one thread counts for all: their stores come first
    before = tl.atomic_add(counter, more, sem="acq_rel", scope="gpu")
    is_last = before % VOID_SHARE == shares - 1
    tl.store(counter, 0, mask=is_last)
    ended = tl.where(before + more < VOID_SHARE, SUMMED, SUMMED_VOID)
    return tl.where(is_last, ended, LEFT_OUT)


@triton.jit
def _summed(first, SIZE: tl.constexpr, shares):
    total = tl.load(first)
    for _ in range(1, shares):
        first += SIZE
        total += tl.load(first)
    return total
