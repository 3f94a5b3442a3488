"""Tiles of experts: one launch multiplies groups of rows by weights of one shape, and the device knows which by which.

The table has the tiles of each group (`fill_tiles_kernel`), and `TileRow.weight` names its expert; how many tiles there
are lies on the device, too. Nothing else is another kernel: the matmul kernels find an expert's columns in one tensor
of all weights, its bias and its scales behind those of the experts before. A row may be gathered (`ExpertRows.rows`)
and scattered (`into`); an index out of range is not followed. Rows that arrive while the launch runs a tile waits for
(`Arrivals`); those that come first stand first.
"""

import triton
import triton.language as tl

from overweave.kernels.tile_end import EXPERTS
from overweave.lang.tile_table import (
    ADDS_NOTHING,
    ALSO,
    COL,
    COLUMNS,
    OPERATION,
    PLACE,
    ROW,
    ROW_END,
    SIGNAL,
    SIGNALS_NOBODY,
    SOURCE_ROW,
    WAIT_COUNT,
    WAIT_HI,
    WAIT_LO,
    WEIGHT,
    WIDTH,
    read_column,
)

VOID_EXPERT = tl.constexpr(-1)  # of tiles of a table that makes no sense: their results are NaN
WORDS = tl.constexpr(triton.next_power_of_2(COLUMNS.value))


@triton.jit
def tiles_of(tiles, WEIGHTS: tl.constexpr):
    """How many tiles a launch has: of experts that is on the device."""
    count = tiles
    if WEIGHTS == EXPERTS:
        count = tl.load(tiles)
    return count


@triton.jit
def is_sound(table, tile):
    """1, or 0 of a tile of a table that makes no sense."""
    return (read_column(table, tile, WEIGHT) != VOID_EXPERT).to(tl.int32)


@triton.jit
def gathered_rows(experts, rows, row_end):
    """Which rows of the source these rows of the product are made of, and which of them are any."""
    at = tl.load(experts.rows + rows, mask=rows < row_end, other=-1)
    is_known = (at >= 0) & (at < experts.twice_source_rows // 2)
    return tl.where(is_known, at, 0).to(tl.int64), is_known


@triton.jit
def stored_rows(experts, rows, row_end):
    """Where these rows of the product are stored, and which of them are."""
    at, is_stored = rows, rows < row_end
    if experts.into is not None:
        at = tl.load(experts.into + rows, mask=is_stored, other=-1)
        is_stored = (at >= 0) & (at < experts.twice_out_rows // 2)
    return at.to(tl.int64), is_stored


@triton.jit
def end_rows(value, experts, rows, row_end):
    """Rows times their weights; those that were made of no row are NaN."""
    if experts.weights is not None:
        value *= tl.load(experts.weights + rows, mask=rows < row_end, other=0.0)[:, None]
    if experts.rows is not None:
        at = tl.load(experts.rows + rows, mask=rows < row_end, other=0)
        is_known = (at >= 0) & (at < experts.twice_source_rows // 2)
        value += tl.where(is_known, 0.0, float("nan"))[:, None]
    return value


@triton.jit
def fill_tiles_kernel(
    table,
    head,
    ends,
    arrivals,
    experts,
    rows,
    columns,
    last_width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Fills BLOCK rows of a table: the tiles of every expert, group of tile rows by group, column by column.

    table: int32 `[most, COLUMNS]`. head: int32 `[2]`: the work counter, made zero, and the number of tiles. ends: int32
    `[experts]`, where each one's rows end. arrivals: kernels/arguments.Arrivals, or None: all rows are there. columns:
    of tiles; the last is `last_width` wide (`TileRow.width`).
    """
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_sound = 1
    total = 0  # tile rows of the experts so far
    for first in range(0, experts, AT_ONCE):
        index = first + tl.arange(0, AT_ONCE)
        end = tl.load(ends + index, mask=index < experts, other=0)
        start = tl.load(ends + index - 1, mask=(index > 0) & (index < experts), other=0)
        is_sound &= 1 - tl.max(((end < start) | (end > rows)).to(tl.int32), 0)
    expert = tl.zeros([BLOCK], tl.int32)
    first_tile, row_start = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    row_end, height = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    groups = experts
    if arrivals is not None:
        groups += (arrivals.sources - 1) * arrivals.ahead
    for first in range(0, groups, AT_ONCE):
        group = first + tl.arange(0, AT_ONCE)
        index, place = group, tl.zeros([AT_ONCE], tl.int32)
        if arrivals is not None:
            index, place = arriving_group(group, arrivals)
        is_group = group < groups
        end = tl.load(ends + index, mask=is_group, other=0)
        start = tl.load(ends + index - 1, mask=(index > 0) & is_group, other=0)
        count = tl.cdiv(end - start, BLOCK_M)
        if arrivals is not None:
            skipped, count = arriving_tiles(arrivals, place, index, start, end, experts, is_group, BLOCK_M)
            start += skipped * BLOCK_M
        count = tl.where(is_group & (is_sound == 1), count, 0)
        through = total + tl.cumsum(count, 0)
        begin, end_tile = (through - count) * columns, through * columns
        is_its = (begin[None, :] <= tile[:, None]) & (tile[:, None] < end_tile[None, :])
        expert += tl.sum(tl.where(is_its, index[None, :], 0), 1)
        first_tile += tl.sum(tl.where(is_its, begin[None, :], 0), 1)
        height += tl.sum(tl.where(is_its, count[None, :], 0), 1)
        row_start += tl.sum(tl.where(is_its, start[None, :], 0), 1)
        row_end += tl.sum(tl.where(is_its, end[None, :], 0), 1)
        total += tl.sum(count, 0)
    if is_sound == 0:
        total = tl.cdiv(rows, BLOCK_M)
        expert, row_end, height = expert + VOID_EXPERT, row_end + rows, height + total
    if tl.program_id(0) == 0:
        tl.store(head, 0)
        tl.store(head + 1, total * columns)
    own = tile - first_tile
    group = own // (GROUP_M * columns)
    rows_of_group = tl.maximum(tl.minimum(GROUP_M, height - group * GROUP_M), 1)
    within = own - group * GROUP_M * columns
    row = row_start + (group * GROUP_M + within % rows_of_group) * BLOCK_M
    column = within // rows_of_group
    word = tl.arange(0, WORDS)[None, :]
    value = tl.zeros([BLOCK, WORDS], tl.int32)
    value = tl.where((word == ROW) | (word == SOURCE_ROW), row[:, None], value)
    value = tl.where(word == ROW_END, tl.minimum(row + BLOCK_M, row_end)[:, None], value)
    value = tl.where(word == COL, (column * BLOCK_N)[:, None], value)
    value = tl.where(word == WIDTH, tl.where(column == columns - 1, last_width, 0)[:, None], value)
    value = tl.where(word == WEIGHT, expert[:, None], value)
    value = tl.where((word == SIGNAL) | (word == ALSO), SIGNALS_NOBODY, value)
    value = tl.where(word == PLACE, ADDS_NOTHING, value)
    if arrivals is not None:
        low, high = sources_of(arrivals, expert, row, tl.minimum(row + BLOCK_M, row_end), experts)
        value = tl.where(word == WAIT_LO, low[:, None], value)
        value = tl.where(word == WAIT_HI, high[:, None], value)
        value = tl.where(word == WAIT_COUNT, 1, value)
        value = tl.where(word == OPERATION, arrivals.number, value)
    places = table + tile.to(tl.int64)[:, None] * COLUMNS + word
    tl.store(places, value, mask=(tile < total * columns)[:, None] & (word < COLUMNS))


@triton.jit
def arriving_group(group, arrivals):
    """The expert of each group, and with the how many-th shard its tiles are complete; 0 where that does not count."""
    ahead = tl.maximum(arrivals.ahead, 1)
    early = arrivals.sources * arrivals.ahead
    is_early = group < early
    expert = tl.where(is_early, group % ahead, group - early + arrivals.ahead)
    return expert, tl.where(is_early, group // ahead, 0)


@triton.jit
def arriving_tiles(arrivals, place, expert, start, end, experts, is_group, BLOCK_M: tl.constexpr):
    """How many tiles of its expert a group skips, and how many it has: of the early experts those that the shard that
    comes `place`-th completes. Shards from that of the rank behind this one on stand last, and come last to first; so
    do those before it, ahead of them. A tile of shards of both kinds waits for the last of all.
    """
    rank, sources = arrivals.rank, arrivals.sources
    of_expert, tiles = arrivals.bounds + expert, tl.cdiv(end - start, BLOCK_M)
    owner = (rank + sources - place) % sources
    begin = tl.load(of_expert + owner * experts, mask=is_group, other=0)
    finish = tl.load(of_expert + (owner + 1) * experts, mask=is_group & (owner + 1 < sources), other=0)
    finish = tl.where(owner + 1 < sources, finish, end)
    behind = tl.load(of_expert + (rank + 1) * experts, mask=is_group & (rank + 1 < sources), other=0)
    behind = tl.where(rank + 1 < sources, behind, end)
    first_behind = tl.where(behind < end, (behind - start) // BLOCK_M, tiles)
    is_behind = owner > rank
    skipped = tiles_up_to(begin, start, behind, first_behind, is_behind, BLOCK_M)
    through = tiles_up_to(finish, start, behind, first_behind, is_behind, BLOCK_M)
    is_early = expert < arrivals.ahead
    return tl.where(is_early, skipped, 0), tl.where(is_early, through - skipped, tiles)


@triton.jit
def tiles_up_to(row, start, behind, first_behind, is_behind, BLOCK_M: tl.constexpr):
    """How many tiles are complete with the rows up to one, of those before and of those behind this rank."""
    through = tl.cdiv(row - start, BLOCK_M)
    of_behind = tl.where(row > behind, through, first_behind)
    return tl.where(is_behind, of_behind, tl.minimum(through, first_behind))


@triton.jit
def sources_of(arrivals, expert, row, row_end, experts):
    """Of which shards a tile's rows are: `[low, high)`, whose signals have these numbers."""
    low, high = tl.zeros(expert.shape, tl.int32), tl.zeros(expert.shape, tl.int32) + 1
    for source in range(1, arrivals.sources):
        begin = tl.load(arrivals.bounds + source * experts + tl.maximum(expert, 0))
        low += (begin <= row).to(tl.int32)
        high += (begin < row_end).to(tl.int32)
    return low, high


@triton.jit
def outer_kernel(x, g, ends, out, experts, k, n, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """`x[group].T @ g[group]` of every group, `[experts, k, n]`: one program a tile, over the rows of its group.

    x `[rows, k]`, g `[rows, n]`, contiguous. ends: as of `fill_tiles_kernel`; a group is what lies between two of them,
    within `[0, ends[-1])`.
    """
    across, down = tl.cdiv(n, BLOCK_N), tl.cdiv(k, BLOCK_K)
    tile = tl.program_id(0)
    expert = tile // (across * down)
    within = tile % (across * down)
    cols_k = within // across * BLOCK_K + tl.arange(0, BLOCK_K)
    cols_n = within % across * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    total = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for first in range(start, end, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        is_row = (rows < end)[:, None]
        of_x = x + rows.to(tl.int64)[:, None] * k + cols_k[None, :]
        of_g = g + rows.to(tl.int64)[:, None] * n + cols_n[None, :]
        x_tile = tl.load(of_x, mask=is_row & (cols_k < k)[None, :], other=0.0)
        g_tile = tl.load(of_g, mask=is_row & (cols_n < n)[None, :], other=0.0)
        total = tl.dot(tl.trans(x_tile), g_tile, total, input_precision=PRECISION)
    places = out + expert.to(tl.int64) * k * n + cols_k.to(tl.int64)[:, None] * n + cols_n[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=(cols_k < k)[:, None] & (cols_n < n)[None, :])


@triton.jit
def clear_rest_kernel(x, ends, experts, rows, cols, BLOCK: tl.constexpr):
    """Zeros in all rows from the last group's end on: x `[rows, cols]`, contiguous. Programs take rows in turn."""
    first = tl.minimum(tl.maximum(tl.load(ends + experts - 1), 0), rows)
    for row in range(first + tl.program_id(0), rows, tl.num_programs(0)):
        for col in range(0, cols, BLOCK):
            at = col + tl.arange(0, BLOCK)
            places = x + (tl.zeros([BLOCK], tl.int64) + row) * cols + at
            tl.store(places, tl.zeros([BLOCK], x.dtype.element_ty), mask=at < cols)
