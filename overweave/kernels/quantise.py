"""Row-wise fp8 quantisation: one launch writes the fp8 matrix and a scale for each row."""

import triton
import triton.language as tl

from overweave.kernels.epilogue import larger

SMALLEST_AMAX = tl.constexpr(1e-12)  # lower bound of a row's amax: rows of zeros stay zeros


@triton.jit
def quantise_rows_kernel(x, values, scales, rows, cols, row_stride, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Set scales[row] = max(|x[row]|) / LARGEST, fp32, and values[row] = x[row] / scales[row], in the dtype of values.

    x: rows `row_stride` elements apart, contiguous columns; values: contiguous. LARGEST: of the fp8 dtype. Programs
    stride over rows. A NaN makes its whole row NaN, as in torch.
    """
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        x_row = x + (tl.zeros([BLOCK], tl.int64) + row) * row_stride
        amax = tl.zeros([BLOCK], tl.float32)
        for col in range(0, cols, BLOCK):
            cols_here = col + tl.arange(0, BLOCK)
            amax = larger(amax, tl.abs(tl.load(x_row + cols_here, mask=cols_here < cols, other=0.0).to(tl.float32)))
        scale = tl.div_rn(larger(tl.reduce(amax, 0, larger), SMALLEST_AMAX), LARGEST)
        tl.store(scales + row, scale)
        out_row = values + (tl.zeros([BLOCK], tl.int64) + row) * cols
        for col in range(0, cols, BLOCK):
            cols_here = col + tl.arange(0, BLOCK)
            value = tl.load(x_row + cols_here, mask=cols_here < cols, other=0.0).to(tl.float32)
            value = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
            tl.store(out_row + cols_here, value.to(values.dtype.element_ty), mask=cols_here < cols)
