"""The RMSNorm of whole rows, for kernels that hold a row in one tile: the end of an all-reduce, in its last pass."""

import triton
import triton.language as tl


@triton.jit
def normed_rows(total, residual, norm_weight, z, rows, cols, inside, n, EPS: tl.constexpr):
    """`z = total + residual`, stored, and `z / rms(z) * norm_weight`, given back in fp32.

    Rounded where torch rounds: the sum before the residual is added, and z, of which the norm is. So z has the same
    bits in every plan, whether its sum has travelled or not. residual None: nothing is added.
    """
    offsets = rows.to(tl.int64)[:, None] * n + cols[None, :]
    rounded = total.to(z.dtype.element_ty)
    if residual is not None:
        beside = tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        rounded = (rounded.to(tl.float32) + beside).to(z.dtype.element_ty)
    tl.store(z + offsets, rounded, mask=inside)
    value = rounded.to(tl.float32)
    squares = tl.sum(value * value, axis=1)
    weight = tl.load(norm_weight + cols, mask=cols < n, other=0.0).to(tl.float32)
    return value * tl.rsqrt(squares / n + EPS)[:, None] * weight[None, :]
