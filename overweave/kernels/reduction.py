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
their way (`sum_and_finish_rows`). With an epilogue, rows of the table that say so finish their sums in fp32 before they
round them (epilogue.py).
"""

import triton
import triton.language as tl

from overweave.kernels.epilogue import (
    SUM,
    Elements,
    apply_steps,
    join,
    join_along,
    number_of_row,
    of_step,
    read_beside,
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

# The ordered sum of whole rows, finished on their way to the caller: how an all-reduce or a reduce-scatter ends, in
# its last pass. What is done to them is RMSNorm, or a registered form of whole rows (epilogue.py).

MOST_OPERANDS = tl.constexpr(4)  # of a part of rows, that the registers hold all at once


@triton.jit
def read_operands(addresses, OPERANDS: tl.constexpr):
    """Where the operands of an operation start: its row of the table of addresses. 0: there is none."""
    sources = ()
    for index in tl.static_range(OPERANDS):
        sources += (tl.load(addresses + index),)  # type: ignore[assignment]
    return sources


@triton.jit
def places_in_cells(
    cells, first_row, count, col, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CELL_M: tl.constexpr,
    CELL_N: tl.constexpr,
):  # fmt: skip
    """Where elements of a matrix of `n` columns lie in the stack of its blocks' cells.

    cells: int32, that of each block, row by row. Rows from `count` on have no place, and columns from n on. The table
    is read once for eight columns, which lie side by side in a cell as well; no assembler sees that by itself.
    MEASURED: columns of one cell at a time, an element a thread, took a norm 2.7 times as long as rows in place, in the
    mean of 7 sizes (H100, benchmarks/results/shared.h100.2026-11-26.txt).
    """
    TOGETHER: tl.constexpr = 8  # elements of 16 bits in a vector of 16 bytes; CELL_N is a multiple
    own = tl.arange(0, BLOCK_M)
    rows, cols = first_row + own, col + tl.arange(0, BLOCK_N // TOGETHER) * TOGETHER
    blocks = (rows // CELL_M)[:, None] * ((n + CELL_N - 1) // CELL_N) + (cols // CELL_N)[None, :]
    cell = tl.load(cells + blocks, mask=(own < count)[:, None] & (cols < n)[None, :], other=0)
    starts = cell.to(tl.int64) * (CELL_M * CELL_N) + ((rows % CELL_M)[:, None] * CELL_N + (cols % CELL_N)[None, :])
    places = tl.reshape(starts[:, :, None] + tl.arange(0, TOGETHER)[None, None, :], (BLOCK_M, BLOCK_N))
    return tl.max_contiguous(tl.multiple_of(places, (1, TOGETHER)), (1, TOGETHER))


@triton.jit
def nothing(dtype: tl.constexpr):
    """What stands for an operand that is not there: -0.0, to which any number, a zero of either sign, adds as it is.

    By its bits: written as a number it would be +0.0, and a move, a sum of one operand, would lose the sign of a zero.
    """
    if dtype.primitive_bitwidth == 8:
        bits = tl.full((), -(1 << 7), tl.int8)
    elif dtype.primitive_bitwidth == 16:
        bits = tl.full((), -(1 << 15), tl.int16)
    else:
        bits = tl.full((), -(1 << 31), tl.int32)
    return bits.to(dtype, bitcast=True)


@triton.jit
def load_operands(sources, out, offsets, inside, OPERANDS: tl.constexpr, FIRST: tl.constexpr, SUM_FIRST: tl.constexpr):
    """The operands, each at the same offsets, from the FIRST on, round to the one before it.

    They are of out's dtype. SUM_FIRST: but for number 0, a sum that is kept in fp32.
    """
    loaded = ()
    for step in tl.static_range(OPERANDS):
        source = sources[(FIRST + step) % OPERANDS]
        kept_as = tl.pointer_type(tl.float32) if SUM_FIRST and (FIRST + step) % OPERANDS == 0 else out.dtype
        operand = tl.multiple_of(source.to(kept_as), 16)
        missing = nothing(operand.dtype.element_ty)
        loaded += (tl.load(operand + offsets, mask=inside & (source != 0), other=missing),)  # type: ignore[assignment]
    return loaded


@triton.jit
def ordered_sum(loaded, verdict, OPERANDS: tl.constexpr, FIRST: tl.constexpr):
    """The operands that `load_operands` brought, added in fp32 from number 0 on; NaN where a wait failed."""
    total = loaded[(0 - FIRST) % OPERANDS].to(tl.float32)
    for index in tl.static_range(1, OPERANDS):
        total += loaded[(index - FIRST) % OPERANDS].to(tl.float32)
    return tl.where(verdict == 1, total, float("nan"))


@triton.jit
def sum_in_turn(sources, out, offsets, inside, verdict, OPERANDS: tl.constexpr, SUM_FIRST: tl.constexpr):
    """The same sum of operands that are more than the registers hold: loaded and added as the assembler sees fit."""
    total = tl.broadcast_to(nothing(tl.float32), inside.shape)
    for index in tl.static_range(OPERANDS):
        kept_as = tl.pointer_type(tl.float32) if SUM_FIRST and index == 0 else out.dtype
        operand = tl.multiple_of(sources[index].to(kept_as), 16)
        missing = nothing(operand.dtype.element_ty)
        total += tl.load(operand + offsets, mask=inside & (sources[index] != 0), other=missing).to(tl.float32)
    return tl.where(verdict == 1, total, float("nan"))


@triton.jit
def sum_and_finish_rows(
    sources, target_address, out, after, cells, place, n, verdict,
    OPERANDS: tl.constexpr, FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    CELL_M: tl.constexpr, CELL_N: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows, BLOCK_N columns at a time. What goes to the caller is finished: `z = sum + residual`,
    stored, a number of each row of z, and by it the elements of `out`; of a norm, `z / rms(z) * norm_weight`. Sums that
    go elsewhere are stored as they are.

    Rounded where torch rounds: the sum before the residual is added, and z, of which the number is. So z has the same
    bits in every plan, whether its sum has travelled or not. after.residual None: nothing is added. target_address:
    where the sum goes; 0: to the caller. place, cells: as of `sum_tile`. ROWS: kernels/epilogue.rows_code.
    """
    row, _, count, source_row = place
    z = after.z
    own = tl.arange(0, BLOCK_M)
    has_row = own < count
    source_starts = (source_row + own).to(tl.int64)[:, None] * n
    starts = (row + own).to(tl.int64)[:, None] * n
    target = tl.multiple_of(target_address.to(z.dtype), 16)
    joined = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for col in range(0, n, BLOCK_N):
        cols = col + tl.arange(0, BLOCK_N)
        inside = has_row[:, None] & (cols < n)[None, :]
        offsets = source_starts + cols[None, :]
        if cells is not None:
            offsets = places_in_cells(cells, source_row, count, col, n, BLOCK_M, BLOCK_N, CELL_M, CELL_N)
        if OPERANDS <= MOST_OPERANDS:
            loaded = load_operands(sources, z, offsets, inside, OPERANDS, FIRST, False)
            tl.debug_barrier()  # the assembler would begin to add before it has asked for all (kernels/reduction.py)
            total = ordered_sum(loaded, verdict, OPERANDS, FIRST)
        else:
            total = sum_in_turn(sources, z, offsets, inside, verdict, OPERANDS, False)
        rounded = total.to(z.dtype.element_ty)
        if target_address != 0:
            tl.store(target + source_starts + cols[None, :], rounded, mask=inside)
        else:
            if after.residual is not None:
                beside = tl.load(after.residual + starts + cols[None, :], mask=inside, other=0.0).to(tl.float32)
                rounded = (rounded.to(tl.float32) + beside).to(z.dtype.element_ty)
            tl.store(z + starts + cols[None, :], rounded, mask=inside)
            counted = of_step(ROWS, 0, "of_element")(rounded.to(tl.float32))
            joined = join(joined, join_along(counted, 1, ROWS), ROWS)
    if target_address == 0:
        tl.debug_barrier()  # what is read of z below may have been written by another thread
        number = number_of_row(joined, n, ROWS)
        if after.numbers is not None:
            tl.store(after.numbers + row + own, number, mask=has_row)
        for col in range(0, n, BLOCK_N):
            cols = col + tl.arange(0, BLOCK_N)
            inside = has_row[:, None] & (cols < n)[None, :]
            offsets = starts + cols[None, :]
            value = tl.load(z + offsets, mask=inside, other=0.0).to(tl.float32)
            beside = read_beside(after.inputs, None, Elements(offsets, inside, cols, n, 0, 0, None), ROWS, 0)
            value = of_step(ROWS, 0, "device")(value, number[:, None], beside)
            tl.store(out + offsets, value.to(out.dtype.element_ty), mask=inside)


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
            total = apply_steps(
                total, None, after.inputs, Elements(offsets, inside, cols, n, to_result, 0, None), EPILOGUE, SUM
            )  # fmt: skip

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
