"""A matmul of few rows, in the portable tier: what it takes is the time to read the weight once.

Tiles over the columns, and where these are fewer than SMs, programs side by side along k of a tile: each leaves its
sums in memory, in fp32, and counts itself in; who comes last adds all in the order of k, its own too, so that bits do
not depend on who that was. Nobody waits for another program. Counters are left at zero, for the next launch.
The weight streams through a deep pipeline. Rows are padded to what a tensor core takes; few stand where the weight
would (SWAPPED), because Hopper's large products want 64 rows on the left.
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

MOST_SHARES = tl.constexpr(MOST_SPLITS)
# Steps of k whose weight is on its way while the kernel in front still runs. A gather of few rows takes 4 us, in which
# the memory of an H200 delivers 17 MB: eight steps of 16 KiB for each SM.
STEPS_AHEAD = tl.constexpr(8)
IN_TURN, LEADS, FOLLOWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["m", "splits"])
def skinny_matmul_kernel(
    a,
    b,
    out,
    shares,
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
    TURN: tl.constexpr,
):
    """out `[m, n]` = a `[m, k]` @ b `[k, n]`: rows of a and out are strides apart, b has any.

    One program per tile and share of k: shares of a tile first, then tiles of the same columns, then columns.
    shares: memory/shares.Shares, with BLOCK_M x BLOCK_N places for each program and a counter for each tile; None where
    `splits` is one. B_IS_TRANSPOSED: how b lies in memory. TURN: LEADS: the next kernel starts early; FOLLOWS:
    this one does, before a is there (memory/device/protocol.py).
    """
    # Added to a tensor: a number of one arrives as a plain number.
    n = tl.zeros([], tl.int32) + n
    k = tl.zeros([], tl.int32) + k
    if TURN == LEADS:
        launch_dependents()
    share = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits
    tiles_m = tl.cdiv(m, BLOCK_M)
    row = tile % tiles_m * BLOCK_M
    column = tile // tiles_m * BLOCK_N
    steps = tl.cdiv(k, BLOCK_K)
    low, high = steps * share // splits, steps * (share + 1) // splits
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    within = tl.arange(0, BLOCK_K)
    of_a = a + row.to(tl.int64) * a_stride + rows[:, None] * a_stride + within[None, :]
    tile_b = b + column.to(tl.int64) * b_stride_n
    of_b = tile_b + within[:, None] * b_stride_k + columns[None, :] * b_stride_n
    if TURN == FOLLOWS:
        for step in range(low, tl.minimum(high, low + STEPS_AHEAD)):
            first = step * BLOCK_K
            from_b = tile_b + first.to(tl.int64) * b_stride_k
            _fetch(from_b, k - first, n - column, b_stride_k, b_stride_n, BLOCK_K, BLOCK_N, B_IS_TRANSPOSED)
        wait_for_previous_kernel()
    if SWAPPED:
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(low, high):
        first = step * BLOCK_K
        is_within = within < k - first
        left = tl.load(of_a + first, mask=(rows[:, None] < m - row) & is_within[None, :], other=0.0)
        is_weight = (columns[None, :] < n - column) & is_within[:, None]
        right = tl.load(of_b + first.to(tl.int64) * b_stride_k, mask=is_weight, other=0.0)
        if SWAPPED:
            sums = tl.dot(tl.trans(right), tl.trans(left), sums)
        else:
            sums = tl.dot(left, right, sums)
    if SWAPPED:
        sums = tl.trans(sums)
    is_inside = (rows[:, None] < m - row) & (columns[None, :] < n - column)
    target = out + row.to(tl.int64) * out_stride + column + rows[:, None] * out_stride + columns[None, :]
    if shares is None:
        tl.store(target, sums.to(out.dtype.element_ty), mask=is_inside)
    else:
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        parts = shares.partials + (tile * splits).to(tl.int64) * SIZE + rows[:, None] * BLOCK_N + columns[None, :]
        tl.store(parts + share * SIZE, sums, mask=is_inside)
        if _arrives_last(shares.arrivals + tile, splits):
            total = _added(parts, is_inside, splits, SIZE)
            tl.store(target, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _fetch(b, rows_left, columns_left, b_stride_k, b_stride_n, ROWS, COLUMNS, B_IS_TRANSPOSED: tl.constexpr):
    """Brings a rectangle of the weight to the L2 cache, line by line."""
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
def _arrives_last(counter, splits):
    """Whether all other shares of the tile are in memory."""
    tl.debug_barrier()  # one thread counts for all: their stores come first
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
    tl.store(counter, 0, mask=is_last)
    return is_last


@triton.jit
def _added(parts, is_inside, splits, SIZE: tl.constexpr):
    """All shares in the order of k; the loads of all are under way together."""
    total = tl.load(parts, mask=is_inside, other=0.0)
    for share in tl.static_range(1, MOST_SHARES):
        total += tl.load(parts + share * SIZE, mask=is_inside & (share < splits), other=0.0)
    return total
