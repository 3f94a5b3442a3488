"""Grouped matmul: rows sorted by expert, each group times its expert's weight; the device alone knows the groups.

A first launch (`fill_tiles_kernel`) writes the tile table and the number of tiles; the ordinary matmul kernels read
both. `TileRow.weight` is a tile's expert: its weight, bias and scales are slices of tensors that stack all experts'.
Rows of x may be gathered by an index, rows of the output scattered by one (`ExpertRows`); an index out of range is
never followed. If rows arrive while the launch runs (`Arrivals`), tiles wait for their source ranks' signals, and tiles
whose rows arrive first stand first.
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

VOID_EXPERT = tl.constexpr(-1)  # the expert of all tiles if the offsets are invalid: results are NaN
WORDS = tl.constexpr(triton.next_power_of_2(COLUMNS.value))


@triton.jit
def tile_count(tiles, WEIGHTS: tl.constexpr):
    """Return the number of tiles of a launch. With EXPERTS `tiles` points to it."""
    count = tiles
    if WEIGHTS == EXPERTS:
        count = tl.load(tiles)
    return count


@triton.jit
def is_valid_tile(table, tile):
    """Return 1; 0 for a tile of a table whose expert offsets were invalid, so that its result becomes NaN."""
    return (read_column(table, tile, WEIGHT) != VOID_EXPERT).to(tl.int32)


@triton.jit
def source_rows(experts, rows, row_end):
    """Return (row of x for each of these output rows, whether it is in range); 0 where it is not."""
    index = tl.load(experts.row_index + rows, mask=rows < row_end, other=-1)
    is_valid = (index >= 0) & (index < experts.source_rows_x2 // 2)
    return tl.where(is_valid, index, 0).to(tl.int64), is_valid


@triton.jit
def output_rows(experts, rows, row_end):
    """Return (row of the output tensor to store each of these rows at, whether to store it)."""
    index, is_stored = rows, rows < row_end
    if experts.out_index is not None:
        index = tl.load(experts.out_index + rows, mask=is_stored, other=-1)
        is_stored = (index >= 0) & (index < experts.out_rows_x2 // 2)
    return index.to(tl.int64), is_stored


@triton.jit
def finish_expert_rows(value, experts, rows, row_end):
    """Scale rows by `row_scales` (routing weights); make rows NaN whose gather index is out of range."""
    if experts.row_scales is not None:
        value *= tl.load(experts.row_scales + rows, mask=rows < row_end, other=0.0)[:, None]
    if experts.row_index is not None:
        index = tl.load(experts.row_index + rows, mask=rows < row_end, other=0)
        is_valid = (index >= 0) & (index < experts.source_rows_x2 // 2)
        value += tl.where(is_valid, 0.0, float("nan"))[:, None]
    return value


@triton.jit
def fill_tiles_kernel(
    table,
    head,
    offsets,
    arrivals,
    experts,
    rows,
    tile_cols,
    last_width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write ROWS rows of the tile table: experts in order, each in bands of GROUP_M tile rows, column by column.

    table: int32 `[tiles at most, COLUMNS]`. head: int32 `[2]`, written: the work counter (0) and the number of tiles.
    offsets: int32 `[experts]`, end of each expert's rows, ascending and <= rows; otherwise every tile is VOID_EXPERT.
    arrivals: Arrivals, or None if all rows are present. tile_cols: tiles side by side; the last is `last_width` wide
    (`TileRow.width`). Experts are looked at CHUNK at a time.
    """
    tile = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_sorted = 1
    total = 0  # tile rows of the groups so far
    for chunk in range(0, experts, CHUNK):
        expert_index = chunk + tl.arange(0, CHUNK)
        end = tl.load(offsets + expert_index, mask=expert_index < experts, other=0)
        start = tl.load(offsets + expert_index - 1, mask=(expert_index > 0) & (expert_index < experts), other=0)
        is_sorted &= 1 - tl.max(((end < start) | (end > rows)).to(tl.int32), 0)
    expert = tl.zeros([ROWS], tl.int32)
    first_tile, row_start = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    row_end, tile_rows_of_expert = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    groups = experts
    if arrivals is not None:
        groups += (arrivals.sources - 1) * arrivals.early_experts
    for chunk in range(0, groups, CHUNK):
        group = chunk + tl.arange(0, CHUNK)
        expert_index, shard_step = group, tl.zeros([CHUNK], tl.int32)
        if arrivals is not None:
            expert_index, shard_step = group_expert(group, arrivals)
        is_group = group < groups
        end = tl.load(offsets + expert_index, mask=is_group, other=0)
        start = tl.load(offsets + expert_index - 1, mask=(expert_index > 0) & is_group, other=0)
        tile_rows = tl.cdiv(end - start, BLOCK_M)
        if arrivals is not None:
            skipped, tile_rows = group_tiles(arrivals, shard_step, expert_index, start, end, experts, is_group, BLOCK_M)
            start += skipped * BLOCK_M
        tile_rows = tl.where(is_group & (is_sorted == 1), tile_rows, 0)
        tile_rows_through = total + tl.cumsum(tile_rows, 0)
        first_tile_of_group, end_tile_of_group = (
            (tile_rows_through - tile_rows) * tile_cols,
            tile_rows_through * tile_cols,
        )
        is_member = (first_tile_of_group[None, :] <= tile[:, None]) & (tile[:, None] < end_tile_of_group[None, :])
        expert += tl.sum(tl.where(is_member, expert_index[None, :], 0), 1)
        first_tile += tl.sum(tl.where(is_member, first_tile_of_group[None, :], 0), 1)
        tile_rows_of_expert += tl.sum(tl.where(is_member, tile_rows[None, :], 0), 1)
        row_start += tl.sum(tl.where(is_member, start[None, :], 0), 1)
        row_end += tl.sum(tl.where(is_member, end[None, :], 0), 1)
        total += tl.sum(tile_rows, 0)
    if is_sorted == 0:
        total = tl.cdiv(rows, BLOCK_M)
        expert, row_end, tile_rows_of_expert = expert + VOID_EXPERT, row_end + rows, tile_rows_of_expert + total
    if tl.program_id(0) == 0:
        tl.store(head, 0)
        tl.store(head + 1, total * tile_cols)
    tile_in_expert = tile - first_tile
    group = tile_in_expert // (GROUP_M * tile_cols)
    rows_of_group = tl.maximum(tl.minimum(GROUP_M, tile_rows_of_expert - group * GROUP_M), 1)
    tile_in_band = tile_in_expert - group * GROUP_M * tile_cols
    row = row_start + (group * GROUP_M + tile_in_band % rows_of_group) * BLOCK_M
    column = tile_in_band // rows_of_group
    word = tl.arange(0, WORDS)[None, :]
    value = tl.zeros([ROWS, WORDS], tl.int32)
    value = tl.where((word == ROW) | (word == SOURCE_ROW), row[:, None], value)
    value = tl.where(word == ROW_END, tl.minimum(row + BLOCK_M, row_end)[:, None], value)
    value = tl.where(word == COL, (column * BLOCK_N)[:, None], value)
    value = tl.where(word == WIDTH, tl.where(column == tile_cols - 1, last_width, 0)[:, None], value)
    value = tl.where(word == WEIGHT, expert[:, None], value)
    value = tl.where((word == SIGNAL) | (word == ALSO), SIGNALS_NOBODY, value)
    value = tl.where(word == PLACE, ADDS_NOTHING, value)
    if arrivals is not None:
        low, high = source_range(arrivals, expert, row, tl.minimum(row + BLOCK_M, row_end), experts)
        value = tl.where(word == WAIT_LO, low[:, None], value)
        value = tl.where(word == WAIT_HI, high[:, None], value)
        value = tl.where(word == WAIT_COUNT, 1, value)
        value = tl.where(word == OPERATION, arrivals.operation, value)
    addresses = table + tile.to(tl.int64)[:, None] * COLUMNS + word
    tl.store(addresses, value, mask=(tile < total * tile_cols)[:, None] & (word < COLUMNS))


@triton.jit
def group_expert(group, arrivals):
    """Return (expert, shard step) of each group of tiles in the table.

    Each early expert has one group per arriving shard: tiles that shard step (0: own) completes. Others have one group.
    """
    early_experts = tl.maximum(arrivals.early_experts, 1)
    early_groups = arrivals.sources * arrivals.early_experts
    is_early = group < early_groups
    expert = tl.where(is_early, group % early_experts, group - early_groups + arrivals.early_experts)
    return expert, tl.where(is_early, group // early_experts, 0)


@triton.jit
def group_tiles(arrivals, shard_step, expert, start, end, experts, is_group, BLOCK_M: tl.constexpr):
    """Return (tile rows of its expert that precede the group, tile rows of the group).

    An early expert's group has the tiles that shard `shard_step` completes as it arrives; another expert's has all. An
    expert's rows are sorted by source rank. Shards arrive in the order rank, rank - 1, ..., 0, then the last, ...,
    rank + 1; a tile that has rows on both sides of the boundary between ranks `rank` and rank + 1 waits for the latest.
    """
    rank, sources = arrivals.rank, arrivals.sources
    expert_starts, tiles = arrivals.row_starts + expert, tl.cdiv(end - start, BLOCK_M)
    owner = (rank + sources - shard_step) % sources
    shard_begin = tl.load(expert_starts + owner * experts, mask=is_group, other=0)
    shard_end = tl.load(expert_starts + (owner + 1) * experts, mask=is_group & (owner + 1 < sources), other=0)
    shard_end = tl.where(owner + 1 < sources, shard_end, end)
    later_begin = tl.load(expert_starts + (rank + 1) * experts, mask=is_group & (rank + 1 < sources), other=0)
    later_begin = tl.where(rank + 1 < sources, later_begin, end)
    first_later_tile = tl.where(later_begin < end, (later_begin - start) // BLOCK_M, tiles)
    is_later = owner > rank
    skipped = tiles_up_to(shard_begin, start, later_begin, first_later_tile, is_later, BLOCK_M)
    tiles_through = tiles_up_to(shard_end, start, later_begin, first_later_tile, is_later, BLOCK_M)
    is_early = expert < arrivals.early_experts
    return tl.where(is_early, skipped, 0), tl.where(is_early, tiles_through - skipped, tiles)


@triton.jit
def tiles_up_to(row, start, later_begin, first_later_tile, is_later, BLOCK_M: tl.constexpr):
    """Return how many tile rows of an expert begin before `row`, on the same side of the first tile of later ranks."""
    through = tl.cdiv(row - start, BLOCK_M)
    later_tiles = tl.where(row > later_begin, through, first_later_tile)
    return tl.where(is_later, later_tiles, tl.minimum(through, first_later_tile))


@triton.jit
def source_range(arrivals, expert, row, row_end, experts):
    """Return the source ranks `[low, high)` of an expert's rows `[row, row_end)`: also the indices of their signals."""
    low, high = tl.zeros(expert.shape, tl.int32), tl.zeros(expert.shape, tl.int32) + 1
    for source in range(1, arrivals.sources):
        begin = tl.load(arrivals.row_starts + source * experts + tl.maximum(expert, 0))
        low += (begin <= row).to(tl.int32)
        high += (begin < row_end).to(tl.int32)
    return low, high


@triton.jit
def outer_kernel(x, g, offsets, out, experts, k, n, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Compute out[expert] = x[group].T @ g[group], `[experts, k, n]`, the weight gradients of a grouped matmul.

    x `[rows, k]`, g `[rows, n]`, contiguous. offsets: int32 `[experts]`, ends of groups. One program a tile of out.
    """
    tiles_n, tiles_k = tl.cdiv(n, BLOCK_N), tl.cdiv(k, BLOCK_K)
    tile = tl.program_id(0)
    expert = tile // (tiles_n * tiles_k)
    tile_of_expert = tile % (tiles_n * tiles_k)
    cols_k = tile_of_expert // tiles_n * BLOCK_K + tl.arange(0, BLOCK_K)
    cols_n = tile_of_expert % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    accumulator = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for first in range(start, end, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        is_row = (rows < end)[:, None]
        x_pointers = x + rows.to(tl.int64)[:, None] * k + cols_k[None, :]
        g_pointers = g + rows.to(tl.int64)[:, None] * n + cols_n[None, :]
        x_tile = tl.load(x_pointers, mask=is_row & (cols_k < k)[None, :], other=0.0)
        g_tile = tl.load(g_pointers, mask=is_row & (cols_n < n)[None, :], other=0.0)
        accumulator = tl.dot(tl.trans(x_tile), g_tile, accumulator, input_precision=PRECISION)
    out_pointers = out + expert.to(tl.int64) * k * n + cols_k.to(tl.int64)[:, None] * n + cols_n[None, :]
    tl.store(out_pointers, accumulator.to(out.dtype.element_ty), mask=(cols_k < k)[:, None] & (cols_n < n)[None, :])


@triton.jit
def clear_rest_kernel(x, offsets, experts, rows, cols, BLOCK: tl.constexpr):
    """Zero the rows of x `[rows, cols]`, contiguous, behind the last group. Programs stride over rows."""
    first = tl.minimum(tl.maximum(tl.load(offsets + experts - 1), 0), rows)
    for row in range(first + tl.program_id(0), rows, tl.num_programs(0)):
        for col in range(0, cols, BLOCK):
            cols_here = col + tl.arange(0, BLOCK)
            pointers = x + (tl.zeros([BLOCK], tl.int64) + row) * cols + cols_here
            tl.store(pointers, tl.zeros([BLOCK], x.dtype.element_ty), mask=cols_here < cols)
