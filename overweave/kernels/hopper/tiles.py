"""Where a consumer's half of a tile lies, and how partitions of one warp wait for what a row of the table says."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.compat.triton_names import VIEWS_ARE_WHOLE, reinterpret
from overweave.kernels.tile_end import EXPERTS, weight_of
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

# A stage of operands, or a consumer's result, is a group of rectangles. As many of each group as the largest power of
# two come first, group by group, and the rest of all groups behind them: of 3 rectangles in each of G groups, rectangle
# 0 of group g is number 2 g, and rectangle 2 number 2 G + g. So whatever is multiplied in one accumulator lies at a
# multiple of its own size, which is how Triton 3.9 lets shared memory be seen in another shape. Where a Triton takes
# only shapes of the same size, and as many rectangles as there are do not make whole ones of that power of two, the
# rest is an allocation of its own.

VIEWED_WHOLE = gl.constexpr(VIEWS_ARE_WHOLE)


class Rectangles(NamedTuple):
    """Of all groups, in shared memory `[count, rows, columns]`. rest: those behind `first`, None if all lie there."""

    first: Any
    rest: Any


@gluon.constexpr_function
def power_of_two(count):
    """The largest up to `count`."""
    return 1 << (count.bit_length() - 1)


@gluon.constexpr_function
def count_first(parts, groups):
    """How many rectangles the first allocation has, of `parts` in each of so many groups: all, if it may have them."""
    whole = power_of_two(parts)
    return whole * groups if VIEWED_WHOLE.value and parts * groups % whole else parts * groups


@gluon.jit
def place(rectangles, group, part: gl.constexpr, GROUPS: gl.constexpr):
    """Where a group's rectangle `part` lies, of GROUPS groups: in which allocation, and its number there."""
    PARTS: gl.constexpr = rectangles.first.type.shape[0] // GROUPS
    WHOLE: gl.constexpr = power_of_two(PARTS)
    if part < WHOLE:
        return rectangles.first, WHOLE * group + part
    elif rectangles.rest is None:
        return rectangles.first, WHOLE * GROUPS + (PARTS - WHOLE) * group + (part - WHOLE)
    else:
        return rectangles.rest, rectangles.rest.type.shape[0] // GROUPS * group + (part - WHOLE)


@gluon.jit
def rectangle(rectangles, group, part: gl.constexpr, GROUPS: gl.constexpr):
    """A group's rectangle `part`, of GROUPS groups."""
    tiles, number = place(rectangles, group, part, GROUPS)
    return tiles.index(number)


@gluon.jit
def side_by_side(
    rectangles, group, part: gl.constexpr, MANY: gl.constexpr, GROUPS: gl.constexpr, DOWN: gl.constexpr
):  # fmt: skip
    """MANY rectangles of a group, from `part` on, as one: beside each other, or with DOWN one below the other."""
    if MANY == 1:
        return rectangle(rectangles, group, part, GROUPS)
    else:
        tiles = rectangles.first
        WHOLE: gl.constexpr = power_of_two(tiles.type.shape[0] // GROUPS)
        gl.static_assert(part % MANY == 0 and part + MANY <= WHOLE)
        ROWS: gl.constexpr = tiles.type.shape[1] * (MANY if DOWN else 1)
        COLS: gl.constexpr = tiles.type.shape[2] * (1 if DOWN else MANY)
        wide = reinterpret(tiles, tiles.dtype, [tiles.type.shape[0] // MANY, ROWS, COLS], tiles.type.layout)
        return wide.index(WHOLE // MANY * group + part // MANY)


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
    return 2 if traits.in_columns or traits.is_gated else traits.split_n


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
