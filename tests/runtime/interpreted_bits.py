"""Arithmetic of interpreted kernels, bit for bit that of a GPU; and what a table of bits cannot tell.

Run by test_interpreter.py in a process of its own, as interpreted_kernels.py is.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
import triton.runtime.interpreter as triton_interpreter  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from campaigns.bits.operations import Launch, launches  # noqa: E402
from campaigns.bits.table import (  # noqa: E402
    Row,
    differences,
    kept_with,
    run,
    run_all,
)
from overweave.runtime.interpreted.numbers import fma_to_odd, round_to_nearest, widen  # noqa: E402

CPU = torch.device("cpu")
NARROW = (torch.bfloat16, torch.float16)


def test_every_bit_is_the_gpus():
    kept = kept_with(triton.__version__)
    if kept is None:
        pytest.skip(f"no GPU has been asked with Triton {triton.__version__}: campaigns.gpu_arithmetic --write")
    assert differences(run_all(launches(), CPU), kept[1]) == []


def test_a_bit_that_differs_is_told():
    kept = run(Launch("binary", ("bfloat16", "bfloat16"), ("add", "lt")), CPU)
    changed = {name: Row(row.dtype, row.bits ^ (np.arange(len(row.bits)) == 5)) for name, row in kept.items()}
    assert [line.split(":")[0] for line in differences(changed, kept)] == sorted(kept)
    assert "1 of 1024, the first at 5" in differences(changed, kept)[0]
    assert len(differences({}, kept)) == 2


@triton.jit
def both_kernel(left, right, out, OPERATION: tl.constexpr):
    at = tl.arange(0, 64)
    x, y = tl.load(left + at), tl.load(right + at)
    if OPERATION == "add":
        z = x + y
    elif OPERATION == "eq":
        z = (x == y).to(x.dtype)
    else:
        z = tl.sum(x * y, 0)
    tl.store(out + at, z)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("operation", ["add", "eq"])
def test_what_no_compiler_accepts_of_fp8_is_refused(dtype: str, operation: str):
    x = torch.ones(64).to(getattr(torch, dtype))
    with pytest.raises(Exception, match="Triton compiles none for a GPU"):
        both_kernel[(1,)](x, x, x.clone(), operation)


@triton.jit
def masked_kernel(source, out, low, high):
    at = tl.arange(0, 64)
    x = tl.load(source + at)
    inside = x > low and x < high
    beyond = x <= low or x >= high
    tl.store(out + at, inside.to(tl.int32) + 2 * beyond.to(tl.int32))


def test_and_and_or_of_blocks_are_of_their_elements():
    x, out = torch.arange(64.0), torch.zeros(64, dtype=torch.int32)
    masked_kernel[(1,)](x, out, 9, 50)
    assert torch.equal(out == 1, (x > 9) & (x < 50))
    assert torch.equal(out == 2, (x <= 9) | (x >= 50))


@triton.jit
def _larger_if(x, y):
    if x > y:
        found = x
    else:
        found = y
    return found


@triton.jit
def branching_kernel(source, out):
    x = tl.load(source + tl.arange(0, 64))
    tl.store(out, tl.reduce(x, 0, _larger_if))
    tl.store(out + 1, tl.max(x, 0))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_reduction_may_branch(dtype: torch.dtype):
    x, out = torch.randn(64).to(dtype), torch.zeros(2, dtype=dtype)
    branching_kernel[(1,)](x, out)
    assert out.tolist() == [float(x.max())] * 2


@triton.jit
def atomic_kernel(target, added):
    tl.atomic_add(target + tl.arange(0, 8) % 2, tl.load(added + tl.arange(0, 8)), mask=tl.arange(0, 8) < 6)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_atomic_sums(dtype: torch.dtype):
    """Six numbers to two places by each of four programs, exact in any order."""
    target, added = torch.zeros(2, dtype=dtype), torch.tensor([1, 2, 3, 4, 5, 6, 70, 80]).to(dtype)
    atomic_kernel[(4,)](target, added)
    assert target.tolist() == [4.0 * (1 + 3 + 5), 4.0 * (2 + 4 + 6)]


@triton.jit
def padded_kernel(source, out):
    tl.store(out + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], source.load([0, 0]))


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
def test_loads_are_padded_with_nan(dtype: torch.dtype):
    source, out = torch.ones(8, 16, dtype=dtype), torch.zeros(16, 16, dtype=dtype)
    padded_kernel[(1,)](TensorDescriptor(source, [8, 16], [16, 1], [16, 16], padding="nan"), out)
    assert torch.equal(out[:8], source)
    assert bool(out[8:].isnan().all())


@pytest.mark.parametrize(
    ("name", "one", "other"), [("bf16", 1 + 2**-8, 1), ("fp16", 1 + 2**-11, 1), ("fp32", 1 + 2**-12, 1 + 2**-12)]
)
def test_a_product_that_is_added_rounds_once(name: str, one: float, other: float):
    """Products halfway between two numbers, but for an addend far below: of two roundings both end at one."""
    factors = (np.full(2, each, np.float32) for each in (one, other))
    handle = triton_interpreter.TensorHandle(
        round_to_nearest(fma_to_odd(*factors, np.array([2.0**-100, -(2.0**-100)], np.float32)), name),
        {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[name],
    )
    above, below = widen(handle).astype(float)
    assert (above + below) / 2 == one * other
    assert above > below
