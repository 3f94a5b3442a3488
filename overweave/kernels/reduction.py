"""The ordered reduction kernel: `out = operands[0] + operands[1] + ...` in fp32, in that order, rounded once.

`operands`, int64, has one row per operation of the tile table: OPERANDS addresses (0: none) in any workspace memory, of
this rank or peers; the address of the output (0: the caller's tensor); the signal addresses of NOTIFIED ranks (0:
none). Programs claim rows of the table in order, wait for the signals that a row names, so that a chunk is summed as
soon as its last operand has arrived, and notify all ranks that may read the sum as soon as it is stored.

Each rank loads operand FIRST first, that of the rank after its own, so that ranks do not all read from one peer at a
time. They are added in the same order on all ranks, whatever the order of loads.

A single operand may be stored as permuted blocks: `offsets_in_cells` maps rows and columns to its memory.
The first operand may be an fp32 sum (SUM_FIRST); all others have the output's dtype.

With RMSNorm, or another row-wise form, a tile is whole rows, finished on the way to the caller's tensor
(`sum_and_finish_rows`). With an epilogue, tiles whose table row says that the sum is complete apply it in fp32 before
rounding (epilogue.py).
"""

import triton
import triton.language as tl

from overweave.kernels.epilogue import (
    SUM,
    Elements,
    apply_steps,
    combine,
    combine_axis,
    read_inputs,
    row_statistic,
    step_field,
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

MOST_OPERANDS = tl.constexpr(4)  # of whole-row tiles: as many as registers hold at once


@triton.jit
def read_operands(addresses, OPERANDS: tl.constexpr):
    """Load an operation's operand addresses from its row of the table. 0: no operand."""
    sources = ()
    for index in tl.static_range(OPERANDS):
        sources += (tl.load(addresses + index),)  # type: ignore[assignment]
    return sources


@triton.jit
def offsets_in_cells(
    cells, first_row, count, col, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CELL_M: tl.constexpr,
    CELL_N: tl.constexpr,
):  # fmt: skip
    """Return the memory offsets of a tile's elements, in a matrix of n columns that is stored as permuted cells.

    cells: int32: the cell `[CELL_M, CELL_N]` that stores each block of the matrix, row by row. Rows from `count` on and
    columns from n on are masked. The map is read once for VECTOR columns, which are adjacent in a cell as well; the
    compiler does not see that by itself.
    MEASURED: columns of one cell at a time, an element a thread, took a norm 2.7 times as long as rows in place, in the
    mean of 7 sizes (H100, benchmarks/results/shared.h100.2026-11-26.txt).
    """
    VECTOR: tl.constexpr = 8  # elements of 16 bits in a vector of 16 bytes; CELL_N is a multiple
    row_offsets = tl.arange(0, BLOCK_M)
    rows, cols = first_row + row_offsets, col + tl.arange(0, BLOCK_N // VECTOR) * VECTOR
    blocks = (rows // CELL_M)[:, None] * ((n + CELL_N - 1) // CELL_N) + (cols // CELL_N)[None, :]
    cell = tl.load(cells + blocks, mask=(row_offsets < count)[:, None] & (cols < n)[None, :], other=0)
    starts = cell.to(tl.int64) * (CELL_M * CELL_N) + ((rows % CELL_M)[:, None] * CELL_N + (cols % CELL_N)[None, :])
    offsets = tl.reshape(starts[:, :, None] + tl.arange(0, VECTOR)[None, None, :], (BLOCK_M, BLOCK_N))
    return tl.max_contiguous(tl.multiple_of(offsets, (1, VECTOR)), (1, VECTOR))


@triton.jit
def negative_zero(dtype: tl.constexpr):
    """Return -0.0, the value of a missing operand: adding it changes no number, not even a zero of either sign.

    Made from its bits: as a literal it would become +0.0, and a copy, a sum of one operand, would lose a zero's sign.
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
    """Load all operands at the same offsets, from operand FIRST on, wrapping round. Returns them in that order.

    All have out's dtype; with SUM_FIRST operand 0 is fp32.
    """
    loaded = ()
    for step in tl.static_range(OPERANDS):
        source = sources[(FIRST + step) % OPERANDS]
        pointer_type = tl.pointer_type(tl.float32) if SUM_FIRST and (FIRST + step) % OPERANDS == 0 else out.dtype
        operand = tl.multiple_of(source.to(pointer_type), 16)
        missing = negative_zero(operand.dtype.element_ty)
        loaded += (tl.load(operand + offsets, mask=inside & (source != 0), other=missing),)  # type: ignore[assignment]
    return loaded


@triton.jit
def ordered_sum(loaded, verdict, OPERANDS: tl.constexpr, FIRST: tl.constexpr):
    """Add the result of `load_operands` in fp32, in order from operand 0; NaN if the wait failed (verdict 0)."""
    total = loaded[(0 - FIRST) % OPERANDS].to(tl.float32)
    for index in tl.static_range(1, OPERANDS):
        total += loaded[(index - FIRST) % OPERANDS].to(tl.float32)
    return tl.where(verdict == 1, total, float("nan"))


@triton.jit
def load_and_sum(sources, out, offsets, inside, verdict, OPERANDS: tl.constexpr, SUM_FIRST: tl.constexpr):
    """Load and add operands one by one: the same sum, for more operands than registers hold at once."""
    total = tl.broadcast_to(negative_zero(tl.float32), inside.shape)
    for index in tl.static_range(OPERANDS):
        pointer_type = tl.pointer_type(tl.float32) if SUM_FIRST and index == 0 else out.dtype
        operand = tl.multiple_of(sources[index].to(pointer_type), 16)
        missing = negative_zero(operand.dtype.element_ty)
        total += tl.load(operand + offsets, mask=inside & (sources[index] != 0), other=missing).to(tl.float32)
    return tl.where(verdict == 1, total, float("nan"))


@triton.jit
def sum_and_finish_rows(
    sources, target_address, out, epilogue_args, cells, tile_bounds, n, verdict,
    OPERANDS: tl.constexpr, FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    CELL_M: tl.constexpr, CELL_N: tl.constexpr,
):  # fmt: skip
    """Sum a tile of whole rows, BLOCK_N columns at a time; store it, or finish it if it goes to the caller's tensor.

    Finished: z = round(sum) + residual is stored; a statistic of each row of z; then `out`, element-wise by the
    statistic: of RMSNorm `z / rms(z) * norm_weight`. Rounded where torch rounds, so that z has the same bits in every
    plan. epilogue_args: SumEpilogueArgs; residual None: z = round(sum). target_address: where the sum is stored; 0: it
    goes to the caller. tile_bounds, cells: as of `sum_tile`. ROWS: kernels/epilogue.rows_code.
    """
    row, _, count, source_row = tile_bounds
    z = epilogue_args.z
    row_offsets = tl.arange(0, BLOCK_M)
    in_tile = row_offsets < count
    source_starts = (source_row + row_offsets).to(tl.int64)[:, None] * n
    starts = (row + row_offsets).to(tl.int64)[:, None] * n
    target = tl.multiple_of(target_address.to(z.dtype), 16)
    combined = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for col in range(0, n, BLOCK_N):
        cols = col + tl.arange(0, BLOCK_N)
        inside = in_tile[:, None] & (cols < n)[None, :]
        offsets = source_starts + cols[None, :]
        if cells is not None:
            offsets = offsets_in_cells(cells, source_row, count, col, n, BLOCK_M, BLOCK_N, CELL_M, CELL_N)
        if OPERANDS <= MOST_OPERANDS:
            loaded = load_operands(sources, z, offsets, inside, OPERANDS, FIRST, False)
            tl.debug_barrier()  # keeps ptxas from adding before all loads are issued
            total = ordered_sum(loaded, verdict, OPERANDS, FIRST)
        else:
            total = load_and_sum(sources, z, offsets, inside, verdict, OPERANDS, False)
        rounded = total.to(z.dtype.element_ty)
        if target_address != 0:
            tl.store(target + source_starts + cols[None, :], rounded, mask=inside)
        else:
            if epilogue_args.residual is not None:
                residual = tl.load(epilogue_args.residual + starts + cols[None, :], mask=inside, other=0.0)
                rounded = (rounded.to(tl.float32) + residual.to(tl.float32)).to(z.dtype.element_ty)
            tl.store(z + starts + cols[None, :], rounded, mask=inside)
            contribution = step_field(ROWS, 0, "of_element")(rounded.to(tl.float32))
            combined = combine(combined, combine_axis(contribution, 1, ROWS), ROWS)
    if target_address == 0:
        tl.debug_barrier()  # z is read back by other threads than wrote it
        statistic = row_statistic(combined, n, ROWS)
        if epilogue_args.row_statistics is not None:
            tl.store(epilogue_args.row_statistics + row + row_offsets, statistic, mask=in_tile)
        for col in range(0, n, BLOCK_N):
            cols = col + tl.arange(0, BLOCK_N)
            inside = in_tile[:, None] & (cols < n)[None, :]
            offsets = starts + cols[None, :]
            value = tl.load(z + offsets, mask=inside, other=0.0).to(tl.float32)
            inputs = read_inputs(epilogue_args.inputs, None, Elements(offsets, inside, cols, n, 0, 0, None), ROWS, 0)
            value = step_field(ROWS, 0, "device")(value, statistic[:, None], inputs)
            tl.store(out + offsets, value.to(out.dtype.element_ty), mask=inside)


MOST_IN_FLIGHT = tl.constexpr(4 * 8 * 1024)  # elements of all operands of a tile: 128 a thread of 8 warps


@triton.jit
def sum_tile(
    sources, target_address, out, epilogue_args, cells, tile_bounds, finishes, claims, n, verdict, OPERANDS:
    tl.constexpr, FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUM_FIRST: tl.constexpr, EPILOGUE:
    tl.constexpr, CELL_M: tl.constexpr, CELL_N: tl.constexpr,
):  # fmt: skip
    """Sum and store one tile. Return the index of the next one, claimed while the operands are in flight.

    tile_bounds: first row and column of the result, number of rows, first row in each operand.
    The claim has a block barrier, which also keeps ptxas from adding before all loads are issued: to save registers it
    would pay several memory latencies in sequence. Operands of more than MOST_IN_FLIGHT elements do not fit the
    registers anyway.
    """
    row, col, count, source_row = tile_bounds
    cols = col + tl.arange(0, BLOCK_N)
    inside = (tl.arange(0, BLOCK_M) < count)[:, None] & (cols < n)[None, :]

    rows = (source_row + tl.arange(0, BLOCK_M)).to(tl.int64)
    offsets = rows[:, None] * n + cols[None, :]
    source_offsets = offsets
    if cells is not None:
        source_offsets = offsets_in_cells(cells, source_row, count, col, n, BLOCK_M, BLOCK_N, CELL_M, CELL_N)
    if OPERANDS * BLOCK_M * BLOCK_N <= MOST_IN_FLIGHT:
        loaded = load_operands(sources, out, source_offsets, inside, OPERANDS, FIRST, SUM_FIRST)
        next_tile = claim_tile(claims)
        total = ordered_sum(loaded, verdict, OPERANDS, FIRST)
    else:
        total = load_and_sum(sources, out, source_offsets, inside, verdict, OPERANDS, SUM_FIRST)
        next_tile = claim_tile(claims)
    to_result = (row - source_row).to(tl.int64) * n
    if EPILOGUE:
        if finishes != 0:
            total = apply_steps(
                total, None, epilogue_args.inputs, Elements(offsets, inside, cols, n, to_result, 0, None), EPILOGUE, SUM
            )  # fmt: skip

    if target_address == 0:
        target = out + to_result
    else:
        target = tl.multiple_of(target_address.to(out.dtype), 16)
    tl.store(target + offsets, total.to(out.dtype.element_ty), mask=inside)
    return next_tile


@triton.jit
def reduction_kernel(
    operands,
    out,
    queue,
    protocol,
    n,
    epilogue_args,
    cells,
    OPERANDS: tl.constexpr,
    FIRST: tl.constexpr,
    NOTIFIED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TRACED: tl.constexpr,
    ROWS: tl.constexpr,
    SUM_FIRST: tl.constexpr,
    EPILOGUE: tl.constexpr,
    CELL_M: tl.constexpr,
    CELL_N: tl.constexpr,
):
    """Compute all sums of a table. Tuples: kernels/arguments.py.

    cells: int32, the cell `[CELL_M, CELL_N]` of each block of an operand, row by row; None for row-major operands.
    """
    table, claims, trace, tiles = queue
    tile = claim_tile(claims)
    verdict = tl.full((), 1, tl.int32)
    waited_operation = tl.full((), -1, tl.int32)
    while tile < tiles:
        record_time(trace, tile, CLAIMED, TRACED)
        # Table reads before the wait: their two memory latencies overlap it.
        operation, duties = read_column(table, tile, OPERATION), read_duties(table, tile)
        row, source_row = read_column(table, tile, ROW), read_column(table, tile, SOURCE_ROW)
        count = read_column(table, tile, ROW_END) - row
        tile_bounds = row, read_column(table, tile, COL, BLOCK_N), count, source_row
        signal, finishes = read_column(table, tile, SIGNAL), read_column(table, tile, FINISHES)
        addresses = operands + operation * (OPERANDS + 1 + NOTIFIED)
        sources = read_operands(addresses, OPERANDS)
        target_address = tl.load(addresses + OPERANDS)
        if operation != waited_operation:  # all tiles of an operation wait for the same signals
            verdict = wait_for_duties(
                duties, operation, protocol.signals, protocol.words, protocol.limits, protocol.world_size
            )  # fmt: skip
            waited_operation = operation
        record_time(trace, tile, READY, TRACED)
        if ROWS:
            sum_and_finish_rows(
                sources, target_address, out, epilogue_args, cells, tile_bounds, n, verdict,
                OPERANDS, FIRST, BLOCK_M, BLOCK_N, ROWS, CELL_M, CELL_N,
            )  # fmt: skip
            next_tile = claim_tile(claims)
        else:
            next_tile = sum_tile(
                sources, target_address, out, epilogue_args, cells, tile_bounds, finishes, claims, n, verdict,
                OPERANDS, FIRST, BLOCK_M, BLOCK_N, SUM_FIRST, EPILOGUE, CELL_M, CELL_N,
            )  # fmt: skip
        if signal != SIGNALS_NOBODY:  # one lane a rank: all are notified at once
            notified = tl.load(addresses + OPERANDS + 1 + tl.arange(0, NOTIFIED))
            notify(notified.to(tl.pointer_type(tl.int32)) + signal * STRIDE, (notified != 0) & (verdict == 1))
        record_time(trace, tile, STORED, TRACED)
        tile = next_tile
