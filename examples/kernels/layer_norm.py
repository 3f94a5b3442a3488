"""A layer norm in the style of the Triton tutorials: one program a row, which it walks three times in blocks.

Annotated from the README and docs/tutorial.md alone.
"""

import triton
import triton.language as tl


@triton.jit
def layer_norm_kernel(
    x_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, row_stride, M, N, eps, BLOCK_SIZE: tl.constexpr
):
    """y = (x - mean) * rstd * weight + bias, row by row; x, y [M, N], weight, bias [N], mean, rstd [M]."""
    # @overweave.axis M block=1
    # @overweave.tile_id
    row = tl.program_id(0)
    x_ptr += row * row_stride
    y_ptr += row * row_stride

    total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, N, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        # @overweave.load X=x_ptr[M, N]
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        total += x
    mean = tl.sum(total, axis=0) / N

    squares = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, N, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        # @overweave.load X=x_ptr[M, N]
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        centred = tl.where(cols < N, x - mean, 0.0)
        squares += centred * centred
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / N + eps)

    # @overweave.store MEAN=mean_ptr[M]
    tl.store(mean_ptr + row, mean)
    # @overweave.store RSTD=rstd_ptr[M]
    tl.store(rstd_ptr + row, rstd)

    for start in range(0, N, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        # @overweave.load X=x_ptr[M, N]
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * weight + bias
        # @overweave.store Y=y_ptr[M, N]
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)
