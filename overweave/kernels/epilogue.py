"""What a tile does to its sums before it stores them: bias, activation, residual, in that order, in fp32.

Written once for both matmul kernels: element-wise code keeps whatever layout its operands have. Which steps there are
is one number, the bits of an `Epilogue` (ir/plan.py), for which a kernel is compiled.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.ir.plan import EPILOGUE_BITS

BIAS = tl.constexpr(EPILOGUE_BITS["bias"])
SILU = tl.constexpr(EPILOGUE_BITS["silu"])
GELU = tl.constexpr(EPILOGUE_BITS["gelu"])
GELU_TANH = tl.constexpr(EPILOGUE_BITS["gelu_tanh"])
PART_COLS = gl.constexpr(16)
RESIDUAL = tl.constexpr(EPILOGUE_BITS["residual"])


@triton.jit
def activated(value, EPILOGUE: tl.constexpr):
    """SiLU, or GELU as torch's `approximate="none"` and `"tanh"` have it."""
    if SILU & EPILOGUE:  # in this order: interpreted, EPILOGUE is a plain int
        value = value / (1.0 + tl.exp(-value))
    if GELU & EPILOGUE:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    if GELU_TANH & EPILOGUE:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        value = value - value / (1.0 + tl.exp(2.0 * inner))  # 0.5 * value * (1 + tanh(inner))
    return value


@triton.jit
def finished(value, bias, residual, rows, row_end, cols, n, EPILOGUE: tl.constexpr):
    """`activation(value + bias) + residual` of the elements [rows, cols] of the product."""
    if BIAS & EPILOGUE:
        value += tl.load(bias + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
    value = activated(value, EPILOGUE)
    if RESIDUAL & EPILOGUE:
        inside = (rows < row_end)[:, None] & (cols < n)[None, :]
        addresses = residual + rows.to(tl.int64)[:, None] * n + cols[None, :]
        value += tl.load(addresses, mask=inside, other=0.0).to(tl.float32)
    return value


@gluon.jit
def finished_by_parts(value, bias, residual, row, row_end, col, n, EPILOGUE: gl.constexpr):
    """`finished` for a Gluon tile from [row, col] on, a few columns at a time: what a whole tile reads would not fit
    beside its sums.
    """
    ROWS: gl.constexpr = value.shape[0]
    COLS: gl.constexpr = value.shape[1]
    LAYOUT: gl.constexpr = value.type.layout
    if COLS > PART_COLS:
        HALF: gl.constexpr = COLS // 2
        left, right = value.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        left = finished_by_parts(left, bias, residual, row, row_end, col, n, EPILOGUE)
        right = finished_by_parts(right, bias, residual, row, row_end, col + HALF, n, EPILOGUE)
        value = gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, COLS])
        value = gl.convert_layout(value, LAYOUT)
    else:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        # What a partition is handed tells the compiler nothing: rounded, it is known to be a multiple.
        cols = col // 16 * 16 + gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
        value = finished(value, bias, residual, rows, row_end, cols, n // 8 * 8, EPILOGUE)
    return value
