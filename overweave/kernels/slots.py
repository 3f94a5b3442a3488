"""Sums over the slots of rows: the products of a token's experts, or the parts that ranks have of a token."""

import triton
import triton.language as tl


@triton.jit
def add_slots_kernel(
    parts,
    is_there,
    out,
    rows,
    cols,
    row_step,
    slot_step,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """out[row] = sum over slots of parts[row, slot], in fp32, slot by slot, rounded once.

    parts: of SLOTS slots, `row_step` and `slot_step` elements apart, columns side by side. is_there: int8 `[rows,
    SLOTS]`, read if MASKED: a slot that is not there is not read. out `[rows, cols]`. A program adds a row at a time.
    """
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        wide_row = tl.full((), 0, tl.int64) + row
        at = parts + wide_row * row_step
        for first in range(0, cols, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < cols
            total = tl.zeros([BLOCK], tl.float32)
            for slot in range(SLOTS):
                is_read = inside
                if MASKED:
                    is_read = inside & (tl.load(is_there + row * SLOTS + slot) != 0)
                part = tl.load(at + slot * slot_step + columns, mask=is_read, other=0.0)
                total += part.to(tl.float32)
            tl.store(out + wide_row * cols + columns, total.to(out.dtype.element_ty), mask=inside)
