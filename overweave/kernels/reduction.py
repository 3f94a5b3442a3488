"""The ordered reduction: `out = operands[0] + operands[1] + ...` in fp32, always in that order, rounded once.

Operands are addresses, so they may lie in any slot, buffer or peer: one row of `operands` per operation of the table,
`OPERANDS` entries wide (0: none), then the address of the output (0: the caller's tensor). Programs claim rows of the
table in order and wait for the signals it names, so a chunk is summed as soon as its last operand has arrived.

With a norm, what goes to the caller's tensor is whole rows (BLOCK_N holds one), and is normed on its way (norm.py).
"""

import triton
import triton.language as tl

from overweave.kernels.norm import normed_rows
from overweave.lang.tile_table import (
    CLAIMED,
    COL,
    OPERATION,
    READY,
    ROW,
    ROW_END,
    SOURCE_ROW,
    STORED,
    claim_tile,
    finish_tile,
    read_column,
    record_time,
    wait_for_tile,
)


@triton.jit
def reduction_kernel(
    operands,
    out,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TRACED: tl.constexpr,
    EPS: tl.constexpr,
):
    tile = claim_tile(claims)
    while tile < tiles:
        record_time(trace, tile, CLAIMED, TRACED)
        verdict = wait_for_tile(table, tile, signals, words, limits, world_size)
        record_time(trace, tile, READY, TRACED)
        row = read_column(table, tile, ROW)
        cols = read_column(table, tile, COL, BLOCK_N) + tl.arange(0, BLOCK_N)
        count = read_column(table, tile, ROW_END) - row
        inside = (tl.arange(0, BLOCK_M) < count)[:, None] & (cols < n)[None, :]

        # Operands start at the first row of their operation; `source_row` counts from there.
        rows = (read_column(table, tile, SOURCE_ROW) + tl.arange(0, BLOCK_M)).to(tl.int64)
        offsets = rows[:, None] * n + cols[None, :]
        addresses = operands + read_column(table, tile, OPERATION) * (OPERANDS + 1)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for index in tl.static_range(OPERANDS):  # unrolled: the loads of all operands are in flight together
            address = tl.load(addresses + index)
            operand = tl.multiple_of(address.to(out.dtype), 16)
            total += tl.load(operand + offsets, mask=inside & (address != 0), other=0.0).to(tl.float32)
        total += tl.where(verdict == 1, 0.0, float("nan"))

        target_address = tl.load(addresses + OPERANDS)
        if target_address == 0:
            target = out + (row - read_column(table, tile, SOURCE_ROW)).to(tl.int64) * n
            if norm_weight is not None:
                rows_of_out = row + tl.arange(0, BLOCK_M)
                total = normed_rows(total, residual, norm_weight, z, rows_of_out, cols, inside, n, EPS)
        else:
            target = tl.multiple_of(target_address.to(out.dtype), 16)
        tl.store(target + offsets, total.to(out.dtype.element_ty), mask=inside)
        finish_tile(table, tile, signals, verdict)
        record_time(trace, tile, STORED, TRACED)
        tile = claim_tile(claims)
