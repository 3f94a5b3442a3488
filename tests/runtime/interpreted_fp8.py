"""fp8 (e4m3) in the interpreter: its numbers, its dots, and the real kernels with scales.

Run by test_interpreter.py in a process of its own, as interpreted_kernels.py is.
"""

from __future__ import annotations

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from tests.runtime.interpreted_kernels import convert_kernel  # noqa: E402


def test_every_fp8_number_widens_exactly():
    source = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    target = torch.zeros(len(source), dtype=torch.float32)
    convert_kernel[(1,)](source, target, len(source), 256)
    assert torch.equal(target.nan_to_num(7.0), source.float().nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_to_fp8_is_torchs_within_its_range(dtype: torch.dtype):
    spread = torch.randn(8192, generator=torch.Generator().manual_seed(3)) * 50
    source = torch.cat([spread, torch.tensor([0.0, 448.0, 1e-3, torch.nan, 1e6, -torch.inf])]).to(dtype)
    target = torch.zeros(len(source), dtype=torch.float8_e4m3fn)
    convert_kernel[(2,)](source, target, len(source), 8192)
    expected = source.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    assert torch.equal(target.float().nan_to_num(7.0), expected.float().nan_to_num(7.0))
    assert target[-3:].float().isnan().tolist() == [True, False, False]


def test_dot_of_fp8_against_fp64():
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(32, 64, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    out = torch.full((32, 32), torch.nan)
    stored = [TensorDescriptor.from_tensor(matrix, [32, 64]) for matrix in (a, b)]
    dot_of_stored_kernel[(1,)](*stored, out)
    exact = a.double() @ b.double().t()
    assert (out - exact).norm() / exact.norm() < 1e-6


@triton.jit
def dot_of_stored_kernel(a, b, out):
    left, right = a.load([0, 0]), b.load([0, 0]).T
    rows, cols = tl.arange(0, left.shape[0]), tl.arange(0, right.shape[1])
    tl.store(out + rows[:, None] * right.shape[1] + cols[None, :], tl.dot(left, right))
