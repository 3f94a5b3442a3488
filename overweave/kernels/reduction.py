"""The ordered reduction: `out = operands[0] + operands[1] + ...` in fp32, always in that order, rounded once.

Operands are addresses, so they may lie in any slot, buffer or peer: one row of `operands` per operation of the table,
`OPERANDS` entries wide (0: none), then the address of the output (0: the caller's tensor), then where the signals of
`TOLD` ranks lie (0: none). Programs claim rows of the table in order and wait for the signals it names, so a chunk is
summed as soon as its last operand has arrived, and tell all ranks that may read it as soon as it is stored.

Each rank begins with the operand FIRST, that of the rank behind its own: so no two ranks read from one at a time. The
sums' order is the same on all.

A single operand may lie in blocks that are permuted: it is read through the map of its cells (`places_in_cells`), of
which a tile has columns of one, into rows of the result.

A first operand may be a sum that is kept in fp32 (SUM_FIRST); else all are of the output's dtype.

With a norm, or another form of whole rows, tiles are such, and those that go to the caller's tensor are finished on
their way (norm.py). With an
epilogue, rows of the table that say so finish their sums in fp32 before they round them (epilogue.py).
"""

import triton
import triton.language as tl

from overweave.kernels.added import ADDED
from overweave.kernels.epilogue import RESIDUAL, ended
from overweave.kernels.norm import (
    load_operands,
    ordered_sum,
    places_in_cells,
    read_operands,
    sum_and_finish_rows,
    sum_in_turn,
)
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
    read_duties,
    record_time,
    wait_for_duties,
)
from overweave.memory.device.signals import STRIDE

MOST_UNDER_WAY = tl.constexpr(4 * 8 * 1024)  # elements of all operands of a tile: with 8 warps, 128 of a thread


@triton.jit
def sum_tile(
    sources, target_address, out, after, cells, place, finishes, claims, n, verdict, OPERANDS: tl.constexpr,
    FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUM_FIRST: tl.constexpr, EPILOGUE: tl.constexpr,
    CELL_M: tl.constexpr, CELL_N: tl.constexpr,
):  # fmt: skip
    """One tile, stored. Returns the number of the next one, claimed while the operands are on their way.

    place: its first row and column, how many rows it has, and where they start in each operand of its operation.
    What the claim's barrier is for too: without one the assembler begins to add before it has asked for all operands,
    to save registers, and a tile takes several latencies of memory, one behind the other. So it may where the operands
    are more than MOST_UNDER_WAY, which would not fit the registers.
    """
    row, col, count, source_row = place
    cols = col + tl.arange(0, BLOCK_N)
    inside = (tl.arange(0, BLOCK_M) < count)[:, None] & (cols < n)[None, :]

    rows = (source_row + tl.arange(0, BLOCK_M)).to(tl.int64)
    offsets = rows[:, None] * n + cols[None, :]
    places = offsets
    if cells is not None:
        places = places_in_cells(cells, source_row, count, col, n, BLOCK_M, BLOCK_N, CELL_M, CELL_N)
    if OPERANDS * BLOCK_M * BLOCK_N <= MOST_UNDER_WAY:
        loaded = load_operands(sources, out, places, inside, OPERANDS, FIRST, SUM_FIRST)
        following = claim_tile(claims)
        total = ordered_sum(loaded, verdict, OPERANDS, FIRST)
    else:
        total = sum_in_turn(sources, out, places, inside, verdict, OPERANDS, SUM_FIRST)
        following = claim_tile(claims)
    to_result = (row - source_row).to(tl.int64) * n
    if EPILOGUE:
        if finishes != 0:
            beside = after.residual
            at = offsets
            if ADDED & EPILOGUE:
                at = offsets + to_result
            elif RESIDUAL & EPILOGUE:
                beside = beside + to_result
            total = ended(total, after.bias, beside, after.more, at, inside, cols, n, EPILOGUE)

    if target_address == 0:
        target = out + to_result
    else:
        target = tl.multiple_of(target_address.to(out.dtype), 16)
    tl.store(target + offsets, total.to(out.dtype.element_ty), mask=inside)
    return following


@triton.jit
def reduction_kernel(
    operands,
    out,
    queue,
    protocol,
    n,
    after,
    cells,
    OPERANDS: tl.constexpr,
    FIRST: tl.constexpr,
    TOLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TRACED: tl.constexpr,
    ROWS: tl.constexpr,
    SUM_FIRST: tl.constexpr,
    EPILOGUE: tl.constexpr,
    CELL_M: tl.constexpr,
    CELL_N: tl.constexpr,
):
    """Tuples: kernels/arguments.py. cells: int32, the cell `[CELL_M, CELL_N]` of each block of an operand, row by row;
    None where operands lie row by row.
    """
    table, claims, trace, tiles = queue
    tile = claim_tile(claims)
    verdict = tl.full((), 1, tl.int32)
    waited = tl.full((), -1, tl.int32)
    while tile < tiles:
        record_time(trace, tile, CLAIMED, TRACED)
        # All that tables say of the tile is read before its wait: two latencies of memory, which nobody waits for then.
        operation, duties = read_column(table, tile, OPERATION), read_duties(table, tile)
        row, source_row = read_column(table, tile, ROW), read_column(table, tile, SOURCE_ROW)
        count = read_column(table, tile, ROW_END) - row
        place = row, read_column(table, tile, COL, BLOCK_N), count, source_row
        signal, finishes = read_column(table, tile, SIGNAL), read_column(table, tile, FINISHES)
        addresses = operands + operation * (OPERANDS + 1 + TOLD)
        sources = read_operands(addresses, OPERANDS)
        target_address = tl.load(addresses + OPERANDS)
        if operation != waited:  # all tiles of an operation wait for the same
            verdict = wait_for_duties(
                duties, operation, protocol.signals, protocol.words, protocol.limits, protocol.world_size
            )  # fmt: skip
            waited = operation
        record_time(trace, tile, READY, TRACED)
        if ROWS:
            sum_and_finish_rows(
                sources, target_address, out, after, cells, place, n, verdict,
                OPERANDS, FIRST, BLOCK_M, BLOCK_N, ROWS, CELL_M, CELL_N,
            )  # fmt: skip
            following = claim_tile(claims)
        else:
            following = sum_tile(
                sources, target_address, out, after, cells, place, finishes, claims, n, verdict,
                OPERANDS, FIRST, BLOCK_M, BLOCK_N, SUM_FIRST, EPILOGUE, CELL_M, CELL_N,
            )  # fmt: skip
        if signal != SIGNALS_NOBODY:  # every rank that may read it, one lane each: they are told at once
            told = tl.load(addresses + OPERANDS + 1 + tl.arange(0, TOLD))
            notify(told.to(tl.pointer_type(tl.int32)) + signal * STRIDE, (told != 0) & (verdict == 1))
        record_time(trace, tile, STORED, TRACED)
        tile = following
