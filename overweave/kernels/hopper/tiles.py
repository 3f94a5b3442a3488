"""TMA boxes in shared memory, which rows of a tile a consumer computes, and waits of one-warp partitions."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.compat.triton_names import VIEWS_ARE_WHOLE, reinterpret
from overweave.kernels.tile_end import EXPERTS, weight_index
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

# A pipeline stage, or a consumer's result, is a group of TMA boxes. The largest power of two of boxes of each group
# come first, group by group, then the rest of all groups: with 3 boxes in each of G groups, box 0 of group g is number
# 2 g, and box 2 is number 2 G + g. So boxes of one accumulator start at a multiple of their joint size, as Triton 3.9
# requires to reinterpret shared memory in another shape. A Triton that reinterprets only to the same total size gets
# the rest as a second allocation, if all boxes together are no multiple of that power of two.

VIEWED_WHOLE = gl.constexpr(VIEWS_ARE_WHOLE)


class TmaBoxes(NamedTuple):
    """The boxes of all groups in shared memory, `[count, rows, columns]`. rest: a second allocation, or None."""

    first: Any
    rest: Any


@gluon.constexpr_function
def power_of_two(count):
    """Return the largest power of two up to `count`."""
    return 1 << (count.bit_length() - 1)


@gluon.constexpr_function
def count_first(parts, groups):
    """Return how many boxes the first allocation holds, of `parts` a group: all, if Triton can view them so."""
    whole = power_of_two(parts)
    return whole * groups if VIEWED_WHOLE.value and parts * groups % whole else parts * groups


@gluon.jit
def locate_box(boxes, group, part: gl.constexpr, GROUPS: gl.constexpr):
    """Return (allocation, index in it) of box `part` of a group, of GROUPS groups."""
    PARTS: gl.constexpr = boxes.first.type.shape[0] // GROUPS
    POWER: gl.constexpr = power_of_two(PARTS)
    if part < POWER:
        return boxes.first, POWER * group + part
    elif boxes.rest is None:
        return boxes.first, POWER * GROUPS + (PARTS - POWER) * group + (part - POWER)
    else:
        return boxes.rest, boxes.rest.type.shape[0] // GROUPS * group + (part - POWER)


@gluon.jit
def tma_box(boxes, group, part: gl.constexpr, GROUPS: gl.constexpr):
    """Return box `part` of a group, of GROUPS groups, in shared memory."""
    tiles, number = locate_box(boxes, group, part, GROUPS)
    return tiles.index(number)


@gluon.jit
def adjacent_boxes(
    boxes, group, part: gl.constexpr, COUNT: gl.constexpr, GROUPS: gl.constexpr, BELOW: gl.constexpr
):  # fmt: skip
    """Return COUNT boxes of a group from `part` on as one tile: side by side, or with BELOW one below the other."""
    if COUNT == 1:
        return tma_box(boxes, group, part, GROUPS)
    else:
        tiles = boxes.first
        POWER: gl.constexpr = power_of_two(tiles.type.shape[0] // GROUPS)
        gl.static_assert(part % COUNT == 0 and part + COUNT <= POWER)
        ROWS: gl.constexpr = tiles.type.shape[1] * (COUNT if BELOW else 1)
        COLS: gl.constexpr = tiles.type.shape[2] * (1 if BELOW else COUNT)
        wide = reinterpret(tiles, tiles.dtype, [tiles.type.shape[0] // COUNT, ROWS, COLS], tiles.type.layout)
        return wide.index(POWER // COUNT * group + part // COUNT)


WAIT_ASSEMBLY = gl.constexpr(WAIT_UNTIL_AT_LEAST_IN_WARP)


@gluon.constexpr_function
def shifts_rows(traits):
    """Return whether a consumer's rows of a tile that its chunk cuts short are shifted up, to end where the chunk ends.

    Not with addends, which are loaded for the tile's own rows; nor with experts, whose groups end before the matrix.
    """
    return traits.addends == 0 and traits.weights != EXPERTS.value


@gluon.constexpr_function
def may_be_short(traits):
    """Return whether tiles may have rows for the first consumer alone."""
    return traits.weights == EXPERTS.value and not traits.in_columns


@gluon.jit
def is_short_tile(traits: gl.constexpr, table, tile, ROWS: gl.constexpr):
    """Return 1 if the tile has rows for the first consumer alone, else 0."""
    is_short = 0
    if may_be_short(traits):
        is_short = (read_column(table, tile, ROW) + ROWS >= read_column(table, tile, ROW_END)).to(gl.int32)
    return is_short


@gluon.constexpr_function
def b_parts(traits):
    """Return how many TMA boxes of b a step of k loads; of a gated tile one of b and one of the gate weight."""
    return 2 if traits.in_columns or traits.is_gated else traits.split_n


@gluon.jit
def row_shift(row, source_row, row_end, ROWS: gl.constexpr):
    """Return by how many rows a consumer's part is shifted up to end at `row_end`; 0 if it fits.

    source_row: row of `a` of the part's first own row. Shifted by less where there are fewer rows above. The result is
    stored with a mask then.
    MEASURED: bulk loads of rows beyond the end of a matrix hold up those of all programs. Without them 30 matmuls of
    257 to 420 rows reach 0.831 of cuBLAS, with them 0.746 (benchmarks/results/few_rows.h200.2026-11-28.txt).
    """
    return gl.maximum(gl.minimum(row + ROWS - row_end, gl.minimum(row, source_row)), 0)


@gluon.jit
def load_rows(traits: gl.constexpr, table, tile, ROWS: gl.constexpr, PARTS: gl.constexpr):
    """Return (first row of `a` to load, offset of the second consumer's rows from it)."""
    row, row_end = read_column(table, tile, ROW), read_column(table, tile, ROW_END)
    source_row = read_column(table, tile, SOURCE_ROW)
    top, second_offset = source_row, ROWS
    if shifts_rows(traits):
        top -= row_shift(row, source_row, row_end, ROWS)
        if PARTS == 2:
            second_offset += source_row - top - row_shift(row + ROWS, source_row + ROWS, row_end, ROWS)
    return top, second_offset


@gluon.jit
def consumer_position(
    traits: gl.constexpr, table, tile, ROW_OFFSET: gl.constexpr, COL_OFFSET: gl.constexpr, ROWS: gl.constexpr
):
    """Return (first own row of a consumer's part, first row it computes, end of the tile, first column, weight)."""
    own_row, row_end = read_column(table, tile, ROW) + ROW_OFFSET, read_column(table, tile, ROW_END)
    row, col = own_row, read_column(table, tile, COL)
    if shifts_rows(traits):
        row -= row_shift(row, read_column(table, tile, SOURCE_ROW) + ROW_OFFSET, row_end, ROWS)
    return own_row, row, row_end, col + COL_OFFSET, weight_index(table, tile, traits.weights)


@gluon.jit
def wait_for_signal(signal, count, table, tile, protocol):
    """One warp: wait until a signal has reached `count`. Return 1; 0 if the wait timed out or was aborted."""
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
    """`lang.wait_for_tile` for a partition of one warp."""
    verdict = 1
    high = read_column(table, tile, WAIT_HI)
    also = read_column(table, tile, ALSO)
    for index in range(read_column(table, tile, WAIT_LO), high + (also >= 0).to(gl.int32)):
        if verdict == 1:
            signal = gl.where(index < high, index, also)
            count = gl.where(index < high, read_column(table, tile, WAIT_COUNT), read_column(table, tile, ALSO_COUNT))
            verdict = wait_for_signal(signal, count, table, tile, protocol)
    return verdict


@gluon.jit
def wait_for_addends(table, tile, protocol):
    """`kernels.tile_end.wait_for_addends` for a partition of one warp."""
    verdict = 1
    count = read_column(table, tile, LATE_COUNT)
    for signal in range(read_column(table, tile, LATE_LO), read_column(table, tile, LATE_HI)):
        if verdict == 1:
            verdict = wait_for_signal(signal, count, table, tile, protocol)
    return verdict
