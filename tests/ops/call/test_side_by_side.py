"""The sum of several products: in a group of one nothing is laid side by side, and the sum is rounded once."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

import overweave as ow
from overweave.errors import InputError
from tests.ranks import run_ranks

ROWS, COLS, DEPTHS = 5, 24, (16, 40, 8)


def pairs(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(len(DEPTHS))
    xs = [torch.randn(ROWS, k, generator=generator).to(dtype) for k in DEPTHS]
    return xs, [torch.randn(k, COLS, generator=generator).to(dtype) for k in DEPTHS]


def sums_alone() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        xs, ws = pairs(dtype)
        exact = torch.stack([x.double() @ w.double() for x, w in zip(xs, ws, strict=True)]).sum(0)
        with patch.object(torch, "cat", wraps=torch.cat) as joins:
            y = ow.matmul_reduce_scatter(xs, ws)
            assert not joins.called
            beside = ow.matmul_reduce_scatter(xs, ws, plan="sequential")
            assert joins.called
        assert y.dtype == dtype
        # A sum of fp32, rounded once: half of the last bit, but for what fp32 itself lost.
        allowed = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-4
        assert ((y.double() - exact).abs() <= allowed).all()
        assert torch.allclose(y, beside, rtol=torch.finfo(dtype).eps, atol=1e-4)
        bias = torch.ones(COLS, dtype=dtype)
        assert torch.allclose(ow.matmul_reduce_scatter(xs, ws, bias=bias), y + 1, rtol=0.02, atol=0.02)
    empty = ow.matmul_reduce_scatter([x[:0] for x in xs], ws)
    assert empty.shape == (0, COLS)
    for wrong in ([ws[0], ws[1]], [ws[0], ws[1], ws[2][:, :8].contiguous()]):
        with pytest.raises(InputError, match=r"lists of one length|one shape"):
            ow.matmul_reduce_scatter(xs, wrong)


def test_in_a_group_of_one_no_factor_is_copied():
    run_ranks(sums_alone, 1)
