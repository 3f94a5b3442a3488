"""A small annotated kernel whose parts tests replace, read from a file as any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from overweave.errors import OverweaveError
from overweave.ops.author.compile import FusedKernel, compile

SCALE = """
import triton
import triton.language as tl


@triton.jit
def helper(x):
    return x


@triton.jit
def scale(x_ptr, y_ptr, z_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # @overweave.axis M block=BLOCK_M
    # @overweave.axis N block=BLOCK_N
    # @overweave.tile_id
    pid = tl.program_id(0)
    # @overweave.dispatch begin
    # @overweave.pid_map M=pid_m N=pid_n
    pid_m = pid // tl.cdiv(N, BLOCK_N)
    pid_n = pid % tl.cdiv(N, BLOCK_N)
    # @overweave.dispatch end
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = rows[:, None] * N + cols[None, :]
    # @overweave.load X=x_ptr[M, N]
    x = tl.load(x_ptr + at)
    # @overweave.store Y=y_ptr[M, N]
    tl.store(y_ptr + at, x)
"""

ROWS = """
import triton
import triton.language as tl


@triton.jit
def running(x_ptr, y_ptr, z_ptr, ROWS, N, BLOCK: tl.constexpr):
    # @overweave.axis ROWS block=1
    # @overweave.tile_id
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for low in range(0, N, BLOCK):
        at = row * N + low + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at)
        # @overweave.store Y=y_ptr[ROWS, N]
        tl.store(y_ptr + at, total)
        tl.store(z_ptr + at, total)
"""

STREAMED = """
import triton
import triton.language as tl


@triton.jit
def weighed(q_ptr, k_ptr, o_ptr, Q, S, D: tl.constexpr, BLOCK: tl.constexpr):
    # @overweave.axis Q block=BLOCK
    # @overweave.axis S block=BLOCK streamed
    # @overweave.tile_id
    pid = tl.program_id(0)
    rows = pid * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(q_ptr + rows[:, None] * D + tl.arange(0, D)[None, :])
    total = tl.zeros((BLOCK,), tl.float32)
    turns = 0
    place = 0
    k_ptrs = k_ptr + tl.arange(0, BLOCK)[None, :] * D + tl.arange(0, D)[:, None]
    # @overweave.stream S
    for start in range(0, S, BLOCK):
        here = k_ptrs + start * D
        # @overweave.load K=k_ptr[S, D]
        k = tl.load(here)
        total += tl.sum(tl.dot(q, k), 1)
        turns += 1
    # @overweave.store O=o_ptr[Q]
    tl.store(o_ptr + rows, total / turns)
"""


def changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def fused(folder: Path, text: str, schedule: object, *changes: tuple[str, str]) -> FusedKernel:
    """The only annotated kernel of a text, after replacements, with its schedule."""
    folder.mkdir(exist_ok=True)
    path = folder / "kernel.py"
    path.write_text(changed(text, *changes))
    name = next(one for one in ("scale", "running", "weighed") if f"def {one}(" in text)
    return compile(f"{path}:{name}", schedule)  # type: ignore[arg-type]


def refusal(folder: Path, text: str, schedule: object, *changes: tuple[str, str]) -> str:
    """What the compiler says against it."""
    with pytest.raises(OverweaveError) as caught:
        fused(folder, text, schedule, *changes)
    return str(caught.value)
