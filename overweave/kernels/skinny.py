"""Split-K matmul for few rows, where reading B once is all the time: portable Triton.

Tiles of columns; if they are fewer than SMs, `splits` programs divide k of a tile. Each stores its fp32 partial and
adds to an arrival counter; the last to arrive sums all partials in the order of k, its own included, so that bits do
not depend on which was last. No program waits for another. Counters are left at 0 for the next launch.
B streams through a deep pipeline. Rows are padded to the tensor core's minimum; SWAPPED computes the transposed
product, so that few rows stand on the side that may be narrow (Hopper's wgmma wants 64 rows on the left).
"""

import triton
import triton.language as tl

from overweave.ir.plan import MOST_SPLITS
from overweave.memory.device.protocol import (
    LINE_BYTES,
    launch_dependents,
    prefetch_lines,
    wait_for_previous_kernel,
)

UNROLLED_SPLITS = tl.constexpr(MOST_SPLITS)
# Steps of k of B that are prefetched while the kernel in front still runs. A gather of few rows takes 4 us, in which
# the memory of an H200 delivers 17 MB: eight steps of 16 KiB for each SM.
STEPS_AHEAD = tl.constexpr(8)
IN_ORDER, LEADS, FOLLOWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["m", "splits"])
def skinny_matmul_kernel(
    a,
    b,
    out,
    workspace,
    m,
    n,
    k,
    a_stride,
    b_stride_k,
    b_stride_n,
    out_stride,
    splits,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    B_IS_TRANSPOSED: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Compute out `[m, n]` = a `[m, k]` @ b `[k, n]`, sums in fp32. a and out have contiguous rows, b any strides.

    One program per (tile, split): splits of a tile are adjacent, then row tiles of the same columns, then columns.
    workspace: memory/split_k.Shares with BLOCK_M * BLOCK_N fp32 per program and a counter per tile; None if splits is
    1. B_IS_TRANSPOSED: b is contiguous along k. CHAIN (memory/device/protocol.py): LEADS: the next kernel may start
    early; FOLLOWS: this one starts before `a` is written, prefetches b, then waits for the kernel in front.
    """
    # Triton passes an argument of 1 as a constexpr, which lacks tensor methods: added to a tensor it is one.
    n = tl.zeros([], tl.int32) + n
    k = tl.zeros([], tl.int32) + k
    if CHAIN == LEADS:
        launch_dependents()
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits
    tiles_m = tl.cdiv(m, BLOCK_M)
    row = tile % tiles_m * BLOCK_M
    column = tile // tiles_m * BLOCK_N
    steps = tl.cdiv(k, BLOCK_K)
    low, high = steps * split // splits, steps * (split + 1) // splits
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    k_offsets = tl.arange(0, BLOCK_K)
    a_pointers = a + row.to(tl.int64) * a_stride + rows[:, None] * a_stride + k_offsets[None, :]
    b_base = b + column.to(tl.int64) * b_stride_n
    b_pointers = b_base + k_offsets[:, None] * b_stride_k + columns[None, :] * b_stride_n
    if CHAIN == FOLLOWS:
        for step in range(low, tl.minimum(high, low + STEPS_AHEAD)):
            k_start = step * BLOCK_K
            b_step = b_base + k_start.to(tl.int64) * b_stride_k
            _prefetch_tile(b_step, k - k_start, n - column, b_stride_k, b_stride_n, BLOCK_K, BLOCK_N, B_IS_TRANSPOSED)
        wait_for_previous_kernel()
    if SWAPPED:
        accumulator = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(low, high):
        k_start = step * BLOCK_K
        in_k = k_offsets < k - k_start
        a_tile = tl.load(a_pointers + k_start, mask=(rows[:, None] < m - row) & in_k[None, :], other=0.0)
        in_b = (columns[None, :] < n - column) & in_k[:, None]
        b_tile = tl.load(b_pointers + k_start.to(tl.int64) * b_stride_k, mask=in_b, other=0.0)
        if SWAPPED:
            accumulator = tl.dot(tl.trans(b_tile), tl.trans(a_tile), accumulator)
        else:
            accumulator = tl.dot(a_tile, b_tile, accumulator)
    if SWAPPED:
        accumulator = tl.trans(accumulator)
    in_out = (rows[:, None] < m - row) & (columns[None, :] < n - column)
    target = out + row.to(tl.int64) * out_stride + column + rows[:, None] * out_stride + columns[None, :]
    if workspace is None:
        tl.store(target, accumulator.to(out.dtype.element_ty), mask=in_out)
    else:
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        partials = workspace.partials + (tile * splits).to(tl.int64) * SIZE + rows[:, None] * BLOCK_N + columns[None, :]
        tl.store(partials + split * SIZE, accumulator, mask=in_out)
        if _is_last_split(workspace.arrivals + tile, splits):
            total = _sum_splits(partials, in_out, splits, SIZE)
            tl.store(target, total.to(out.dtype.element_ty), mask=in_out)


@triton.jit
def _prefetch_tile(b, rows_left, columns_left, b_stride_k, b_stride_n, ROWS, COLUMNS, B_IS_TRANSPOSED: tl.constexpr):
    """Prefetch a tile of b into L2, one request per cache line."""
    LINE: tl.constexpr = LINE_BYTES // (b.dtype.element_ty.primitive_bitwidth // 8)
    if B_IS_TRANSPOSED:
        rows = tl.arange(0, (ROWS + LINE - 1) // LINE) * LINE
        columns = tl.arange(0, COLUMNS)
    else:
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, (COLUMNS + LINE - 1) // LINE) * LINE
    inside = (rows[:, None] < rows_left) & (columns[None, :] < columns_left)
    prefetch_lines(b + rows[:, None] * b_stride_k + columns[None, :] * b_stride_n, inside)


@triton.jit
def _is_last_split(counter, splits):
    """Count this program in; return whether it is the last split of its tile. Resets the counter then."""
    tl.debug_barrier()  # one thread's atomic releases the stores of all threads
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
    tl.store(counter, 0, mask=is_last)
    return is_last


@triton.jit
def _sum_splits(parts, is_inside, splits, SIZE: tl.constexpr):
    """Sum the partials of all splits in the order of k; unrolled, so that all loads are in flight together."""
    total = tl.load(parts, mask=is_inside, other=0.0)
    for split in tl.static_range(1, UNROLLED_SPLITS):
        total += tl.load(parts + split * SIZE, mask=is_inside & (split < splits), other=0.0)
    return total
