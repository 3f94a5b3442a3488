"""Where a consumer's half of a tile lies, and how partitions of one warp wait for what a row of the table says."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.kernels.epilogue import GATE
from overweave.kernels.weights import EXPERTS, weight_of
from overweave.lang.tile_table import (
    ALSO,
    ALSO_COUNT,
    COL,
    LATE_COUNT,
    LATE_HI,
    LATE_LO,
    OPERATION,
    ROW,
    ROW_END,
    SOURCE_ROW,
    WAIT_COUNT,
    WAIT_HI,
    WAIT_LO,
    read_column,
)
from overweave.memory.device.ptx import WAIT_UNTIL_AT_LEAST_IN_WARP
from overweave.memory.device.signals import STRIDE, TIMEOUT_NS, report_timeout

WAIT_ASSEMBLY = gl.constexpr(WAIT_UNTIL_AT_LEAST_IN_WARP)


@gluon.constexpr_function
def moves_rows(traits):
    """Whether a consumer's part of a tile that a chunk cuts short has rows ahead of the tile's own, so that it ends as
    the chunk does. Not where tiles add what peers sent: addends are loaded for the tile's own rows. Not of experts: all
    their groups but the last end before the matrix does.
    """
    return traits.addends == 0 and traits.weights != EXPERTS.value


@gluon.constexpr_function
def may_be_short(traits):
    """Whether a tile may have rows for the first consumer alone, so that the second has nothing to multiply."""
    return traits.weights == EXPERTS.value and not traits.in_columns


@gluon.jit
def is_short_tile(traits: gl.constexpr, table, tile, ROWS: gl.constexpr):
    """1 of such a tile."""
    is_short = 0
    if may_be_short(traits):
        is_short = (read_column(table, tile, ROW) + ROWS >= read_column(table, tile, ROW_END)).to(gl.int32)
    return is_short


@gluon.constexpr_function
def b_parts(traits):
    """How many rectangles of b a step of k has: of a gated tile one of each factor."""
    return 2 if traits.in_columns or traits.epilogue & GATE.value else traits.split_n


@gluon.jit
def rows_ahead(row, source_row, row_end, ROWS: gl.constexpr):
    """How many rows ahead of its own first one a consumer's part begins, if there are as many; a mask stores its own.

    source_row: where the part's own first row is read.
    MEASURED: bulk loads of rows beyond the end of a matrix hold up those of all programs. Without them 30 matmuls of
    257 to 420 rows reach 0.831 of cuBLAS, with them 0.746 (benchmarks/results/few_rows.h200.2026-11-28.txt).
    """
    return gl.maximum(gl.minimum(row + ROWS - row_end, gl.minimum(row, source_row)), 0)


@gluon.jit
def source_of(traits: gl.constexpr, table, tile, ROWS: gl.constexpr, PARTS: gl.constexpr):
    """Where the first part of a tile's rows is read from, and how much further the second."""
    row, row_end = read_column(table, tile, ROW), read_column(table, tile, ROW_END)
    source_row = read_column(table, tile, SOURCE_ROW)
    top, further = source_row, ROWS
    if moves_rows(traits):
        top -= rows_ahead(row, source_row, row_end, ROWS)
        if PARTS == 2:
            further += source_row - top - rows_ahead(row + ROWS, source_row + ROWS, row_end, ROWS)
    return top, further


@gluon.jit
def place_of(traits: gl.constexpr, table, tile, BELOW: gl.constexpr, BESIDE: gl.constexpr, ROWS: gl.constexpr):
    """A consumer's first row of the tile, the first that it multiplies, the end of the tile's rows, the first column,
    and whose they are.
    """
    own_row, row_end = read_column(table, tile, ROW) + BELOW, read_column(table, tile, ROW_END)
    row, col = own_row, read_column(table, tile, COL)
    if moves_rows(traits):
        row -= rows_ahead(row, read_column(table, tile, SOURCE_ROW) + BELOW, row_end, ROWS)
    return own_row, row, row_end, col + BESIDE, weight_of(table, tile, traits.weights)


@gluon.jit
def wait_for_signal(signal, count, table, tile, protocol):
    """1 once a signal has reached its count, or 0 if the wait is void, after sounding the alarm."""
    signals, words, limits, world_size = protocol
    word = signals + signal * STRIDE
    verdict = gl.inline_asm_elementwise(
        WAIT_ASSEMBLY,
        "=r,l,r,l,l",
        [word, count, words, gl.load(limits + TIMEOUT_NS)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    if verdict == 0:
        report_timeout(word, count, read_column(table, tile, OPERATION), signal, words, limits, world_size)
    return verdict


@gluon.jit
def wait_for_tile(table, tile, protocol):
    """As `lang.wait_for_tile`."""
    verdict = 1
    high = read_column(table, tile, WAIT_HI)
    also = read_column(table, tile, ALSO)
    for place in range(read_column(table, tile, WAIT_LO), high + (also >= 0).to(gl.int32)):
        if verdict == 1:
            signal = gl.where(place < high, place, also)
            count = gl.where(place < high, read_column(table, tile, WAIT_COUNT), read_column(table, tile, ALSO_COUNT))
            verdict = wait_for_signal(signal, count, table, tile, protocol)
    return verdict


@gluon.jit
def wait_for_addends(table, tile, protocol):
    """As `kernels.received.wait_for_addends`."""
    verdict = 1
    count = read_column(table, tile, LATE_COUNT)
    for signal in range(read_column(table, tile, LATE_LO), read_column(table, tile, LATE_HI)):
        if verdict == 1:
            verdict = wait_for_signal(signal, count, table, tile, protocol)
    return verdict
