"""Kernels of rows and elements in the form of public ones, annotated: directives are comments, no line is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from overweave.compiler.emit.fuse import kernel_of
from overweave.compiler.frontend.source.kernel import AnnotatedKernel

HEAD = "import triton\nimport triton.language as tl\n\n\n"


class Form(NamedTuple):
    """name: of the kernel. call: its numbers, and the shapes of its tensors."""

    name: str
    text: str
    call: dict[str, Any]

    def read(self, folder: Path) -> AnnotatedKernel:
        """The kernel, from a file that is written here."""
        path = folder / f"{self.name}.py"
        path.write_text(HEAD + self.text)
        return kernel_of(path, self.name)

    def given(self) -> dict[str, Any]:
        """The arguments of a call."""
        integers = {"Y_ptr"} if self.name == "cross_entropy_kernel" else set()
        shapes = {name: value for name, value in self.call.items() if isinstance(value, tuple)}
        dtypes = {name: torch.int32 if name in integers else torch.float32 for name in shapes}
        return self.call | {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}


ADD = Form(
    "add_kernel",
    """@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    # @overweave.axis N=n_elements block=BLOCK_SIZE
    # @overweave.tile_id
    pid = tl.program_id(axis=0)
    block_start = pid * BLOCK_SIZE
    offsets = block_start + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    # @overweave.load X=x_ptr[N]
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    # @overweave.store O=output_ptr[N]
    tl.store(output_ptr + offsets, x + y, mask=mask)
""",
    {"n_elements": 200, "BLOCK_SIZE": 64, "x_ptr": (200,), "y_ptr": (200,), "output_ptr": (200,)},
)
SOFTMAX = Form(
    "softmax_kernel",
    """@triton.jit
def softmax_kernel(output_ptr, input_ptr, input_row_stride, output_row_stride, n_rows, n_cols,
                   BLOCK_SIZE: tl.constexpr, num_stages: tl.constexpr):
    # @overweave.axis ROWS=n_rows block=1
    row_start = tl.program_id(0)
    row_step = tl.num_programs(0)
    # @overweave.tile_id persistent
    for row_idx in tl.range(row_start, n_rows, row_step, num_stages=num_stages):
        row_start_ptr = input_ptr + row_idx * input_row_stride
        col_offsets = tl.arange(0, BLOCK_SIZE)
        input_ptrs = row_start_ptr + col_offsets
        mask = col_offsets < n_cols
        # @overweave.load X=input_ptr[ROWS, n_cols]
        row = tl.load(input_ptrs, mask=mask, other=-float("inf"))
        row_minus_max = row - tl.max(row, axis=0)
        numerator = tl.exp(row_minus_max)
        denominator = tl.sum(numerator, axis=0)
        softmax_output = numerator / denominator
        output_row_start_ptr = output_ptr + row_idx * output_row_stride
        output_ptrs = output_row_start_ptr + col_offsets
        # @overweave.store Y=output_ptr[ROWS, n_cols]
        tl.store(output_ptrs, softmax_output, mask=mask)
""",
    {
        "output_ptr": (9, 40),
        "input_ptr": (9, 40),
        "input_row_stride": 40,
        "output_row_stride": 40,
        "n_rows": 9,
        "n_cols": 40,
        "BLOCK_SIZE": 64,
        "num_stages": 2,
    },
)
LAYER_NORM = Form(
    "layer_norm_fwd_fused",
    """@triton.jit
def layer_norm_fwd_fused(X, Y, W, B, Mean, Rstd, stride, N, eps, BLOCK_SIZE: tl.constexpr):
    # @overweave.axis M=Y.shape[0] block=1
    # @overweave.tile_id
    row = tl.program_id(0)
    Y += row * stride
    X += row * stride
    _mean = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        # @overweave.load X=X[M, N]
        a = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        _mean += a
    mean = tl.sum(_mean, axis=0) / N
    _var = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        # @overweave.load X=X[M, N]
        x = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.where(cols < N, x - mean, 0.0)
        _var += x * x
    rstd = 1 / tl.sqrt(tl.sum(_var, axis=0) / N + eps)
    # @overweave.store MEAN=Mean[M]
    tl.store(Mean + row, mean)
    # @overweave.store RSTD=Rstd[M]
    tl.store(Rstd + row, rstd)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        mask = cols < N
        w = tl.load(W + cols, mask=mask)
        b = tl.load(B + cols, mask=mask)
        # @overweave.load X=X[M, N]
        x = tl.load(X + cols, mask=mask, other=0.0).to(tl.float32)
        # @overweave.store Y=Y[M, N]
        tl.store(Y + cols, (x - mean) * rstd * w + b, mask=mask)
""",
    {
        "X": (10, 40),
        "Y": (10, 40),
        "W": (40,),
        "B": (40,),
        "Mean": (10,),
        "Rstd": (10,),
        "stride": 40,
        "N": 40,
        "eps": 1e-5,
        "BLOCK_SIZE": 16,
    },
)
RMS_NORM = Form(
    "rms_norm_forward_kernel",
    """@triton.jit
def rms_norm_forward_kernel(Y_ptr, Y_row_stride, X_ptr, X_row_stride, W_ptr, RSTD_ptr, n_cols, eps, offset,
                            BLOCK_SIZE: tl.constexpr):
    # @overweave.axis ROWS=Y_ptr.shape[0] block=1
    # @overweave.tile_id
    row_idx = tl.program_id(0).to(tl.int64)
    col_offsets = tl.arange(0, BLOCK_SIZE)
    mask = col_offsets < n_cols
    y_base = Y_ptr + row_idx * Y_row_stride
    x_base = X_ptr + row_idx * X_row_stride
    # @overweave.load X=X_ptr[ROWS, n_cols]
    X_row = tl.load(x_base + col_offsets, mask=mask, other=0)
    W_row = tl.load(W_ptr + col_offsets, mask=mask, other=0)
    X_row = X_row.to(tl.float32)
    mean_square = tl.sum(X_row * X_row, axis=0) / n_cols
    rstd = tl.rsqrt(mean_square + eps.to(tl.float32))
    # @overweave.store RSTD=RSTD_ptr[ROWS]
    tl.store(RSTD_ptr + row_idx, rstd)
    # @overweave.store Y=Y_ptr[ROWS, n_cols]
    tl.store(y_base + col_offsets, X_row * rstd * (offset + W_row), mask=mask)
""",
    {
        "Y_ptr": (9, 40),
        "Y_row_stride": 40,
        "X_ptr": (9, 40),
        "X_row_stride": 40,
        "W_ptr": (40,),
        "RSTD_ptr": (9,),
        "n_cols": 40,
        "eps": 1e-6,
        "offset": 0.0,
        "BLOCK_SIZE": 64,
    },
)
SWIGLU = Form(
    "swiglu_forward_kernel",
    """@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def swiglu_forward_kernel(a_ptr, b_ptr, c_ptr, stride, n_cols: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    # @overweave.axis ROWS=c_ptr.shape[0] block=1
    # @overweave.tile_id
    program_id = tl.program_id(0).to(tl.int64)
    a_ptr += program_id * stride
    b_ptr += program_id * stride
    c_ptr += program_id * stride
    col_offsets = tl.arange(0, BLOCK_SIZE)
    mask = col_offsets < n_cols
    # @overweave.load A=a_ptr[ROWS, n_cols]
    a_row = tl.load(a_ptr + col_offsets, mask=mask, other=0).to(tl.float32)
    b_row = tl.load(b_ptr + col_offsets, mask=mask, other=0)
    c_row = silu(a_row).cast(b_row.dtype) * b_row
    # @overweave.store C=c_ptr[ROWS, n_cols]
    tl.store(c_ptr + col_offsets, c_row, mask=mask)
""",
    {"a_ptr": (9, 40), "b_ptr": (9, 40), "c_ptr": (9, 40), "stride": 40, "n_cols": 40, "BLOCK_SIZE": 64},
)
ROPE = Form(
    "rope_kernel",
    """@triton.jit
def rope_kernel(x_ptr, cos_ptr, sin_ptr, y_ptr, T, H, D: tl.constexpr, BLOCK_H: tl.constexpr):
    # @overweave.axis T block=1
    # @overweave.tile_id
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)
    half = tl.arange(0, D // 2)
    cos = tl.load(cos_ptr + token * (D // 2) + half)[None, :]
    sin = tl.load(sin_ptr + token * (D // 2) + half)[None, :]
    first = token * H * D + heads[:, None] * D + half[None, :]
    second = first + D // 2
    mask = heads[:, None] < H
    # @overweave.load X=x_ptr[T, H, D]
    left = tl.load(x_ptr + first, mask=mask, other=0.0)
    # @overweave.load X=x_ptr[T, H, D]
    right = tl.load(x_ptr + second, mask=mask, other=0.0)
    # @overweave.store Y=y_ptr[T, H, D]
    tl.store(y_ptr + first, left * cos - right * sin, mask=mask)
    # @overweave.store Y=y_ptr[T, H, D]
    tl.store(y_ptr + second, right * cos + left * sin, mask=mask)
""",
    {
        "x_ptr": (9, 3, 16),
        "cos_ptr": (9, 8),
        "sin_ptr": (9, 8),
        "y_ptr": (9, 3, 16),
        "T": 9,
        "H": 3,
        "D": 16,
        "BLOCK_H": 4,
    },
)
DROPOUT = Form(
    "seeded_dropout",
    """@triton.jit
def seeded_dropout(x_ptr, output_ptr, n_elements, p, seed, BLOCK_SIZE: tl.constexpr):
    # @overweave.axis N=n_elements block=BLOCK_SIZE
    # @overweave.tile_id
    pid = tl.program_id(axis=0)
    block_start = pid * BLOCK_SIZE
    offsets = block_start + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    # @overweave.load X=x_ptr[N]
    x = tl.load(x_ptr + offsets, mask=mask)
    random = tl.rand(seed, offsets)
    x_keep = random > p
    output = tl.where(x_keep, x / (1 - p), 0.0)
    # @overweave.store O=output_ptr[N]
    tl.store(output_ptr + offsets, output, mask=mask)
""",
    {"x_ptr": (200,), "output_ptr": (200,), "n_elements": 200, "p": 0.5, "seed": 3, "BLOCK_SIZE": 64},
)
CROSS_ENTROPY = Form(
    "cross_entropy_kernel",
    """@triton.jit
def cross_entropy_kernel(X_ptr, X_stride, Y_ptr, loss_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    # @overweave.axis ROWS=loss_ptr.shape[0] block=1
    # @overweave.tile_id
    program_id = tl.program_id(0).to(tl.int64)
    y = tl.load(Y_ptr + program_id)
    X_ptr += program_id * X_stride
    m = float("-inf")
    d = 0.0
    # @overweave.load X=X_ptr[ROWS, n_cols]
    ori_X_y = tl.load(X_ptr + y).cast(tl.float32)
    for i in range(0, n_cols, BLOCK_SIZE):
        X_offsets = i + tl.arange(0, BLOCK_SIZE)
        # @overweave.load X=X_ptr[ROWS, n_cols]
        X_block = tl.load(X_ptr + X_offsets, mask=X_offsets < n_cols, other=float("-inf")).cast(tl.float32)
        block_max = tl.max(X_block)
        m_new = tl.maximum(m, block_max)
        d = d * tl.exp(m - m_new) + tl.sum(tl.exp(X_block - m_new))
        m = m_new
    lse = m + tl.log(d)
    # @overweave.store LOSS=loss_ptr[ROWS]
    tl.store(loss_ptr + program_id, lse - ori_X_y)
""",
    {"X_ptr": (9, 40), "X_stride": 40, "Y_ptr": (9,), "loss_ptr": (9,), "n_cols": 40, "BLOCK_SIZE": 16},
)
ROWS = (ADD, SOFTMAX, LAYER_NORM, RMS_NORM, SWIGLU, ROPE, DROPOUT, CROSS_ENTROPY)
