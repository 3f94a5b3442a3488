"""An RMS norm with a residual: one program normalises one row. What it stores is what is exchanged."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x, residual, weight, out, ROWS, COLS, eps, BLOCK: tl.constexpr):
    """out = (x + residual) / rms(x + residual) * weight, row by row; [ROWS, COLS], weight [COLS]."""
    # @overweave.axis ROWS block=1
    # @overweave.tile_id
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < COLS
    # @overweave.load X=x[ROWS, COLS]
    value = tl.load(x + row * COLS + cols, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + row * COLS + cols, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / COLS + eps)
    scaled = value * scale * tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    # @overweave.store OUT=out[ROWS, COLS]
    tl.store(out + row * COLS + cols, scaled.to(out.dtype.element_ty), mask=inside)
