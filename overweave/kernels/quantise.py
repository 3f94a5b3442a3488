"""Rows in fp8, each with a scale of its own: one launch reads a matrix and writes both."""

import triton
import triton.language as tl

from overweave.kernels.epilogue import larger

LEAST = tl.constexpr(1e-12)  # that a row's largest element is taken for: rows of zeros stay zeros


@triton.jit
def quantise_rows_kernel(x, values, scales, rows, cols, row_stride, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """`scales[row] = max(|x[row]|) / LARGEST`, fp32, and `values[row] = x[row] / scales[row]`, in the dtype of values.

    x: rows `row_stride` elements apart, of contiguous columns; values: contiguous. Programs take rows in turn. A row
    with a NaN has NaNs alone, as in torch.
    """
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        own = x + (tl.zeros([BLOCK], tl.int64) + row) * row_stride
        most = tl.zeros([BLOCK], tl.float32)
        for col in range(0, cols, BLOCK):
            at = col + tl.arange(0, BLOCK)
            most = larger(most, tl.abs(tl.load(own + at, mask=at < cols, other=0.0).to(tl.float32)))
        scale = tl.div_rn(larger(tl.reduce(most, 0, larger), LEAST), LARGEST)
        tl.store(scales + row, scale)
        out = values + (tl.zeros([BLOCK], tl.int64) + row) * cols
        for col in range(0, cols, BLOCK):
            at = col + tl.arange(0, BLOCK)
            value = tl.load(own + at, mask=at < cols, other=0.0).to(tl.float32)
            value = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
            tl.store(out + at, value.to(values.dtype.element_ty), mask=at < cols)
