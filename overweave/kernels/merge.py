"""Merges attention results over two sets of keys by their log-sum-exps, in one pass."""

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    total,
    total_lse,
    part,
    part_lse,
    out,
    out_lse,
    heads,
    rows,
    begin,
    end,
    total_stride_b,
    total_stride_h,
    total_stride_s,
    part_stride_b,
    part_stride_h,
    part_stride_s,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Compute out = softmax-weighted sum of `total` and `part`, in fp32; out_lse = their joint log-sum-exp.

    total `[b, heads, rows, COLUMNS]`; part: the same for rows `[begin, end)` alone; both with any strides of b, heads
    and rows. out and all log-sum-exps (fp32) are contiguous; out may be total. A row that sees no key in either keeps
    log-sum-exp -inf. A program merges BLOCK_ROWS rows of a head.
    """
    batch_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    is_row = row < rows
    in_part = is_row & (row >= begin) & (row < end)
    lse = tl.load(total_lse + batch_head * rows + row, mask=is_row, other=0.0)
    lse_part = tl.load(part_lse + batch_head * (end - begin) + row - begin, mask=in_part, other=-float("inf"))
    lse_max = tl.maximum(lse, lse_part)
    lse_max = tl.where(lse_max == -float("inf"), 0.0, lse_max)  # neither sees a key: avoids inf - inf
    weight, weight_part = tl.exp(lse - lse_max), tl.exp(lse_part - lse_max)
    weight_sum = weight + weight_part
    fraction = tl.where(weight_sum == 0.0, 0.0, weight_part / weight_sum)
    tl.store(
        out_lse + batch_head * rows + row,
        tl.where(weight_sum == 0.0, -float("inf"), lse_max + tl.log(weight_sum)),
        mask=is_row,
    )

    batch, head = batch_head // heads, batch_head % heads
    inside = columns[None, :] < COLUMNS
    row64 = row.to(tl.int64)[:, None]
    total_pointers = total + batch * total_stride_b + head * total_stride_h + row64 * total_stride_s + columns[None, :]
    value = tl.load(total_pointers, mask=is_row[:, None] & inside, other=0.0).to(tl.float32)
    part_pointers = (
        part + batch * part_stride_b + head * part_stride_h + (row64 - begin) * part_stride_s + columns[None, :]
    )
    value_part = tl.load(part_pointers, mask=in_part[:, None] & inside, other=0.0).to(tl.float32)
    merged = value + fraction[:, None] * (value_part - value)
    target = out + (batch_head * rows + row64) * COLUMNS + columns[None, :]
    tl.store(target, merged.to(out.dtype.element_ty), mask=is_row[:, None] & inside)
