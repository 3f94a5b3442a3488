"""The ordered sum of whole rows, finished on their way to the caller: how an all-reduce or a reduce-scatter ends, in
its last pass. What is done to them is RMSNorm, or a registered form of whole rows (added.py)."""

import triton
import triton.language as tl

from overweave.kernels.added import join, join_along, number_of_row, of_step, read_beside

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
    where the sum goes; 0: to the caller. place, cells: as of `sum_tile`. ROWS: kernels/added.rows_code.
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
            beside = read_beside(after.more, offsets, inside, cols, n, ROWS, 0)
            value = of_step(ROWS, 0, "device")(value, number[:, None], beside)
            tl.store(out + offsets, value.to(out.dtype.element_ty), mask=inside)
