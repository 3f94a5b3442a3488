"""The merge of attention over two sets of keys, in one pass over both results."""

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
    total_batch,
    total_head,
    total_row,
    part_batch,
    part_head,
    part_row,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out = total and part weighed by their log-sum-exps, in fp32, rounded once; out_lse = the logarithm of both sums.

    total `[b, heads, rows, COLUMNS]`, and part of its rows `[begin, end)`, any steps between batches, heads and rows;
    out and all log-sum-exps are contiguous. out may be total. A program has BLOCK_ROWS rows of a head.
    """
    of_head = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    is_row = at < rows
    is_part = is_row & (at >= begin) & (at < end)
    lse = tl.load(total_lse + of_head * rows + at, mask=is_row, other=0.0)
    lse_of_part = tl.load(part_lse + of_head * (end - begin) + at - begin, mask=is_part, other=-float("inf"))
    most = tl.maximum(lse, lse_of_part)
    most = tl.where(most == -float("inf"), 0.0, most)  # neither sees a key, which is not the same as no number
    weight, weight_of_part = tl.exp(lse - most), tl.exp(lse_of_part - most)
    both = weight + weight_of_part
    share = tl.where(both == 0.0, 0.0, weight_of_part / both)
    tl.store(out_lse + of_head * rows + at, tl.where(both == 0.0, -float("inf"), most + tl.log(both)), mask=is_row)

    batch, head = of_head // heads, of_head % heads
    inside = columns[None, :] < COLUMNS
    wide = at.to(tl.int64)[:, None]
    here = total + batch * total_batch + head * total_head + wide * total_row + columns[None, :]
    value = tl.load(here, mask=is_row[:, None] & inside, other=0.0).to(tl.float32)
    there = part + batch * part_batch + head * part_head + (wide - begin) * part_row + columns[None, :]
    value_of_part = tl.load(there, mask=is_part[:, None] & inside, other=0.0).to(tl.float32)
    merged = value + share[:, None] * (value_of_part - value)
    target = out + (of_head * rows + wide) * COLUMNS + columns[None, :]
    tl.store(target, merged.to(out.dtype.element_ty), mask=is_row[:, None] & inside)
