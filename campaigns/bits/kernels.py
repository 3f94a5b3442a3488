"""Kernels of one operation on each element, for whichever dtypes: compiled on a GPU, interpreted on a CPU.

Every result is stored as its bits in an int64, with a code that tells its dtype (`values.dtype_of`).
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTEGER = tl.constexpr(63)  # where the code of a floating-point dtype has the width of its mantissa
_ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _put(out, codes, slot: tl.constexpr, value, count: tl.constexpr):
    """Stores `count` results and their dtype's code: 64 x its width in bits + the width of its mantissa."""
    width: tl.constexpr = value.dtype.primitive_bitwidth
    if width == 8:
        bits = value.to(tl.uint8, bitcast=True)
    elif width == 16:
        bits = value.to(tl.uint16, bitcast=True)
    elif width == 32:
        bits = value.to(tl.uint32, bitcast=True)
    elif width == 64:
        bits = value.to(tl.uint64, bitcast=True)
    else:
        bits = value
    tl.store(out + slot * count + tl.arange(0, count), bits.to(tl.int64))
    if value.dtype.is_floating():
        tl.store(codes + slot, 64 * width + value.dtype.fp_mantissa_width)
    else:
        tl.store(codes + slot, 64 * width + _INTEGER)


@triton.jit
def binary_kernel(left, right, out, codes, ROWS: tl.constexpr, CHOSEN: tl.constexpr):
    """Every left value with every right one. CHOSEN: a bit for each of `operations.BINARY`."""
    count: tl.constexpr = ROWS * ROWS
    at = tl.arange(0, count)
    x = tl.load(left + at // ROWS)
    y = tl.load(right + at % ROWS)
    if CHOSEN & 1 << 0:
        _put(out, codes, 0, x + y, count)
    if CHOSEN & 1 << 1:
        _put(out, codes, 1, x - y, count)
    if CHOSEN & 1 << 2:
        _put(out, codes, 2, x * y, count)
    if CHOSEN & 1 << 3:
        _put(out, codes, 3, x / y, count)
    if CHOSEN & 1 << 4:
        _put(out, codes, 4, x % y, count)
    if CHOSEN & 1 << 5:
        _put(out, codes, 5, tl.maximum(x, y), count)
    if CHOSEN & 1 << 6:
        _put(out, codes, 6, tl.maximum(x, y, propagate_nan=_ALL), count)
    if CHOSEN & 1 << 7:
        _put(out, codes, 7, tl.minimum(x, y), count)
    if CHOSEN & 1 << 8:
        _put(out, codes, 8, tl.minimum(x, y, propagate_nan=_ALL), count)
    if CHOSEN & 1 << 9:
        _put(out, codes, 9, x == y, count)
    if CHOSEN & 1 << 10:
        _put(out, codes, 10, x != y, count)
    if CHOSEN & 1 << 11:
        _put(out, codes, 11, x < y, count)
    if CHOSEN & 1 << 12:
        _put(out, codes, 12, x <= y, count)
    if CHOSEN & 1 << 13:
        _put(out, codes, 13, x > y, count)
    if CHOSEN & 1 << 14:
        _put(out, codes, 14, x >= y, count)
    if CHOSEN & 1 << 15:
        _put(out, codes, 15, tl.where(at % 3 == 0, x, y), count)
    if CHOSEN & 1 << 16:
        _put(out, codes, 16, tl.fma(x, y, x), count)
    if CHOSEN & 1 << 17:
        _put(out, codes, 17, tl.clamp(x, y, tl.abs(y)), count)
    if CHOSEN & 1 << 18:
        _put(out, codes, 18, tl.clamp(x, y, tl.abs(y), propagate_nan=_ALL), count)
    if CHOSEN & 1 << 19:
        _put(out, codes, 19, x & y, count)
    if CHOSEN & 1 << 20:
        _put(out, codes, 20, x | y, count)
    if CHOSEN & 1 << 21:
        _put(out, codes, 21, x ^ y, count)
    if CHOSEN & 1 << 22:
        _put(out, codes, 22, x << (y & 7), count)
    if CHOSEN & 1 << 23:
        _put(out, codes, 23, x >> (y & 7), count)
    if CHOSEN & 1 << 24:
        _put(out, codes, 24, x // (y | 1), count)
    if CHOSEN & 1 << 25:
        _put(out, codes, 25, x % (y | 1), count)


@triton.jit
def unary_kernel(source, out, codes, COUNT: tl.constexpr, CHOSEN: tl.constexpr):
    """CHOSEN: a bit for each of `operations.UNARY`."""
    x = tl.load(source + tl.arange(0, COUNT))
    if CHOSEN & 1 << 0:
        _put(out, codes, 0, -x, COUNT)
    if CHOSEN & 1 << 1:
        _put(out, codes, 1, tl.abs(x), COUNT)
    if CHOSEN & 1 << 2:
        _put(out, codes, 2, x * 1.5, COUNT)
    if CHOSEN & 1 << 3:
        _put(out, codes, 3, 3 - x, COUNT)
    if CHOSEN & 1 << 4:
        _put(out, codes, 4, x > 0, COUNT)
    if CHOSEN & 1 << 5:
        _put(out, codes, 5, tl.where(x > 0.25, x, 0.0), COUNT)
    if CHOSEN & 1 << 6:
        _put(out, codes, 6, tl.full([COUNT], 1.3, x.dtype), COUNT)
    if CHOSEN & 1 << 7:
        _put(out, codes, 7, ~x, COUNT)
    if CHOSEN & 1 << 9:
        _put(out, codes, 9, tl.full([COUNT], 1e-7, x.dtype), COUNT)
    if CHOSEN & 1 << 10:
        _put(out, codes, 10, 0.1 - x, COUNT)
    if CHOSEN & 1 << 8:
        _put(out, codes, 8, tl.load(source + tl.arange(0, COUNT), mask=tl.arange(0, COUNT) < 3, other=1.0), COUNT)


@triton.jit
def cast_kernel(source, out, codes, COUNT: tl.constexpr, CHOSEN: tl.constexpr, ROUNDING: tl.constexpr):
    """CHOSEN: a bit for each of `operations.DTYPES`, the targets. ROUNDING: `fp_downcast_rounding` of `to`."""
    x = tl.load(source + tl.arange(0, COUNT))
    if CHOSEN & 1 << 0:
        _put(out, codes, 0, x.to(tl.bfloat16, fp_downcast_rounding=ROUNDING), COUNT)
    if CHOSEN & 1 << 1:
        _put(out, codes, 1, x.to(tl.float16, fp_downcast_rounding=ROUNDING), COUNT)
    if CHOSEN & 1 << 2:
        _put(out, codes, 2, x.to(tl.float32, fp_downcast_rounding=ROUNDING), COUNT)
    if CHOSEN & 1 << 3:
        _put(out, codes, 3, x.to(tl.float64, fp_downcast_rounding=ROUNDING), COUNT)
    if CHOSEN & 1 << 4:
        _put(out, codes, 4, x.to(tl.float8e4nv, fp_downcast_rounding=ROUNDING), COUNT)
    if CHOSEN & 1 << 5:
        _put(out, codes, 5, x.to(tl.float8e5, fp_downcast_rounding=ROUNDING), COUNT)
    if CHOSEN & 1 << 6:
        _put(out, codes, 6, x.to(tl.int1, fp_downcast_rounding=ROUNDING), COUNT)
    if CHOSEN & 1 << 7:
        _put(out, codes, 7, x.to(tl.int8, fp_downcast_rounding=ROUNDING), COUNT)
    if CHOSEN & 1 << 8:
        _put(out, codes, 8, x.to(tl.uint8, fp_downcast_rounding=ROUNDING), COUNT)
    if CHOSEN & 1 << 9:
        _put(out, codes, 9, x.to(tl.int16, fp_downcast_rounding=ROUNDING), COUNT)
    if CHOSEN & 1 << 10:
        _put(out, codes, 10, x.to(tl.uint16, fp_downcast_rounding=ROUNDING), COUNT)
    if CHOSEN & 1 << 11:
        _put(out, codes, 11, x.to(tl.int32, fp_downcast_rounding=ROUNDING), COUNT)
    if CHOSEN & 1 << 12:
        _put(out, codes, 12, x.to(tl.uint32, fp_downcast_rounding=ROUNDING), COUNT)
    if CHOSEN & 1 << 13:
        _put(out, codes, 13, x.to(tl.int64, fp_downcast_rounding=ROUNDING), COUNT)
    if CHOSEN & 1 << 14:
        _put(out, codes, 14, x.to(tl.uint64, fp_downcast_rounding=ROUNDING), COUNT)


@triton.jit
def reduction_kernel(source, out, codes, LANES: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr):
    """Each program reduces a row of one element a lane. CHOSEN: a bit for each of `operations.REDUCTIONS`."""
    row = tl.program_id(0)
    x = tl.load(source + row * LANES + tl.arange(0, LANES))
    to = out + row * LANES
    count: tl.constexpr = ROWS * LANES
    if CHOSEN & 1 << 0:
        _spread(to, codes, 0, tl.sum(x, 0), LANES, count)
    if CHOSEN & 1 << 1:
        _spread(to, codes, 1, tl.max(x, 0), LANES, count)
    if CHOSEN & 1 << 2:
        _spread(to, codes, 2, tl.min(x, 0), LANES, count)
    if CHOSEN & 1 << 3:
        _spread(to, codes, 3, tl.argmax(x, 0), LANES, count)
    if CHOSEN & 1 << 4:
        _spread(to, codes, 4, tl.argmin(x, 0), LANES, count)
    if CHOSEN & 1 << 5:
        _spread(to, codes, 5, tl.argmax(x, 0, tie_break_left=False), LANES, count)
    if CHOSEN & 1 << 6:
        _lay(to, codes, 6, tl.cumsum(x, 0), LANES, count)
    if CHOSEN & 1 << 7:
        _lay(to, codes, 7, tl.cumprod(x, 0), LANES, count)
    if CHOSEN & 1 << 8:
        _lay(to, codes, 8, tl.sort(x), LANES, count)
    if CHOSEN & 1 << 9:
        _spread(to, codes, 9, tl.reduce(x, 0, _product), LANES, count)
    if CHOSEN & 1 << 10:
        _lay(to, codes, 10, tl.cumsum(x, 0, reverse=True), LANES, count)
    if CHOSEN & 1 << 11:
        _spread(to, codes, 11, tl.xor_sum(x, 0), LANES, count)


@triton.jit
def _product(x, y):
    return x * y


@triton.jit
def _spread(out, codes, slot: tl.constexpr, value, lanes: tl.constexpr, count: tl.constexpr):
    """One result of a row, in each of its places."""
    _lay(out, codes, slot, tl.broadcast_to(value, [lanes]), lanes, count)


@triton.jit
def _lay(out, codes, slot: tl.constexpr, value, lanes: tl.constexpr, count: tl.constexpr):
    """The results of a row."""
    _put(out + slot * (count - lanes), codes, slot, value, lanes)


@triton.jit
def dot_kernel(left, right, out, codes, SIDE: tl.constexpr, DEPTH: tl.constexpr, OUT: tl.constexpr):
    """[side, depth] x [depth, side], both row by row."""
    rows, steps = tl.arange(0, SIDE), tl.arange(0, DEPTH)
    x = tl.load(left + rows[:, None] * DEPTH + steps[None, :])
    y = tl.load(right + steps[:, None] * SIDE + rows[None, :])
    _put(out, codes, 0, tl.reshape(tl.dot(x, y, out_dtype=OUT), [SIDE * SIDE]), SIDE * SIDE)
