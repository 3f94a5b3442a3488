"""The matmul of few rows, interpreted, alone: any shape, layout and number of shares. Run by test_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from overweave.ir.plan import SkinnyConfig  # noqa: E402
from overweave.memory.split_k import SharedShares  # noqa: E402
from overweave.runtime.kernel_calls.packed import SkinnyOperands, skinny_call  # noqa: E402

SHAPES = ((1, 64, 256), (5, 40, 104), (17, 77, 85), (3, 1, 40), (2, 33, 1), (40, 24, 16))
CONFIG = SkinnyConfig(block_m=16, block_n=32, block_k=16)


def multiply(config: SkinnyConfig, a: torch.Tensor, b: torch.Tensor, shares: SharedShares) -> torch.Tensor:
    out = torch.full((a.shape[0], b.shape[1]), torch.nan, dtype=a.dtype)
    call = skinny_call(config, SkinnyOperands(a, b, out), shares)
    call.kernel[(call.programs,)](*call.arguments)
    return out


def no_shares() -> SharedShares:
    return SharedShares(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_are_exact(shape: tuple[int, int, int], splits: int, dtype: torch.dtype) -> None:
    m, n, k = shape
    a = torch.randint(-2, 3, (m, k + 3)).to(dtype)[:, :k]  # rows that are further apart than they are long
    for stored in (torch.randint(-2, 3, (k, n)).to(dtype), torch.randint(-2, 3, (n, k)).to(dtype).t()):
        exact = (a.double() @ stored.double()).to(dtype)
        for is_swapped in (False, True):
            config = replace(CONFIG, splits=splits, swapped=is_swapped)
            shares = no_shares()
            for _ in range(2):
                assert torch.equal(multiply(config, a, stored, shares), exact), config
            assert shares.are_unused()


@pytest.mark.parametrize("splits", [1, 8])
def test_floats_are_as_near_as_fp32_sums(splits: int) -> None:
    a, b = torch.randn(5, 512).bfloat16(), torch.randn(512, 48).bfloat16()
    config = replace(CONFIG, splits=splits)
    found, exact = multiply(config, a, b, no_shares()), a.double() @ b.double()
    one_rounding = exact.abs() * 2**-8 + 512**0.5 * 2**-16
    assert ((found.double() - exact).abs() <= one_rounding).all()


def test_shares_are_added_in_the_order_of_k() -> None:
    """In any other, sums of such different sizes are others."""
    a = torch.ones(1, 64).bfloat16()
    b = torch.zeros(64, 8).bfloat16()
    b[0], b[16], b[32] = 2.0**30, -(2.0**30), 3.0
    config = replace(CONFIG, splits=4)
    assert torch.equal(multiply(config, a, b, no_shares()), torch.full((1, 8), 3.0).bfloat16())
