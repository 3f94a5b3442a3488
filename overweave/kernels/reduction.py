"""The ordered reduction: `out = operands[0] + operands[1] + ...` in fp32, always in that order, rounded once.

Operands are addresses, so they may lie in any slot, buffer or peer: one row of `operands` per operation of the table,
`OPERANDS` entries wide (0: none), then the address of the output (0: the caller's tensor), then where the signals of
`TOLD` ranks lie (0: none). Programs claim rows of the table in order and wait for the signals it names, so a chunk is
summed as soon as its last operand has arrived, and tell all ranks that may read it as soon as it is stored.

A first operand may be a sum that is kept in fp32 (SUM_FIRST); else all are of the output's dtype.

With a norm, tiles are whole rows, and those that go to the caller's tensor are normed on their way (norm.py). With an
epilogue, rows of the table that say so finish their sums in fp32 before they round them (epilogue.py).
"""

import triton
import triton.language as tl

from overweave.kernels.epilogue import RESIDUAL, ended
from overweave.kernels.norm import ordered_sum, sum_and_norm_rows
from overweave.lang.tile_table import (
    CLAIMED,
    COL,
    FINISHES,
    OPERATION,
    READY,
    ROW,
    ROW_END,
    SIGNAL,
    SIGNALS_NOBODY,
    SOURCE_ROW,
    STORED,
    claim_tile,
    notify,
    read_column,
    record_time,
    wait_for_tile,
)
from overweave.memory.device import STRIDE


@triton.jit
def sum_tile(
    addresses, out, bias, residual, table, tile, n, verdict, OPERANDS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SUM_FIRST: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """One tile, stored. addresses: the row of its operation."""
    row = read_column(table, tile, ROW)
    cols = read_column(table, tile, COL, BLOCK_N) + tl.arange(0, BLOCK_N)
    count = read_column(table, tile, ROW_END) - row
    inside = (tl.arange(0, BLOCK_M) < count)[:, None] & (cols < n)[None, :]

    # Operands start at the first row of their operation; `source_row` counts from there.
    rows = (read_column(table, tile, SOURCE_ROW) + tl.arange(0, BLOCK_M)).to(tl.int64)
    offsets = rows[:, None] * n + cols[None, :]
    total = ordered_sum(addresses, out, offsets, inside, verdict, OPERANDS, SUM_FIRST)
    to_result = (row - read_column(table, tile, SOURCE_ROW)).to(tl.int64) * n
    if EPILOGUE:
        if read_column(table, tile, FINISHES) != 0:
            beside = residual
            if RESIDUAL & EPILOGUE:
                beside = residual + to_result
            total = ended(total, bias, beside, offsets, inside, cols, n, EPILOGUE)

    target_address = tl.load(addresses + OPERANDS)
    if target_address == 0:
        target = out + to_result
    else:
        target = tl.multiple_of(target_address.to(out.dtype), 16)
    tl.store(target + offsets, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def tell_ranks(told, table, tile, verdict, TOLD: tl.constexpr):
    """Signals, at every rank that waits for it, that the tile is stored, unless nobody asked or the tile is void.

    told: where the signals of these ranks lie. One lane each: they are told at once, behind one barrier.
    """
    signal = read_column(table, tile, SIGNAL)
    if signal != SIGNALS_NOBODY:
        bases = tl.load(told + tl.arange(0, TOLD))
        notify(bases.to(tl.pointer_type(tl.int32)) + signal * STRIDE, (bases != 0) & (verdict == 1))


@triton.jit
def reduction_kernel(
    operands,
    out,
    bias,
    residual,
    norm_weight,
    z,
    table,
    claims,
    signals,
    words,
    limits,
    trace,
    tiles,
    n,
    world_size,
    OPERANDS: tl.constexpr,
    TOLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TRACED: tl.constexpr,
    EPS: tl.constexpr,
    SUM_FIRST: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    tile = claim_tile(claims)
    while tile < tiles:
        record_time(trace, tile, CLAIMED, TRACED)
        verdict = wait_for_tile(table, tile, signals, words, limits, world_size)
        record_time(trace, tile, READY, TRACED)
        addresses = operands + read_column(table, tile, OPERATION) * (OPERANDS + 1 + TOLD)
        if norm_weight is not None:
            sum_and_norm_rows(
                addresses, out, residual, norm_weight, z, table, tile, n, verdict, OPERANDS, BLOCK_M, BLOCK_N, EPS
            )
        else:
            sum_tile(
                addresses, out, bias, residual, table, tile, n, verdict, OPERANDS, BLOCK_M, BLOCK_N, SUM_FIRST, EPILOGUE
            )
        tell_ranks(addresses + OPERANDS + 1, table, tile, verdict, TOLD)
        record_time(trace, tile, STORED, TRACED)
        tile = claim_tile(claims)
