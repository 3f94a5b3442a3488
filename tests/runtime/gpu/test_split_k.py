"""Tiles that are dealt out along k, bound as on a GPU: the kernel compiles with the very arguments of a launch."""

from __future__ import annotations

import pytest
import torch

from overweave.ir.plan import MatmulConfig
from overweave.schedules.tiles.shape import HOPPER
from overweave.tuner.calibrate.rates import Matmul, rows_of
from tests.runtime.without_gpu import Launched, launched

__all__ = ["launched"]  # a fixture


@pytest.mark.slow
@pytest.mark.parametrize("split_k", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("config", [HOPPER[0].config, HOPPER[6].config], ids=lambda config: config.block_n)
def test_matmul_alone(launched: list[Launched], config: MatmulConfig, split_k: int | str) -> None:
    a, b, out = torch.empty(512, 1024), torch.empty(512, 1024).t(), torch.empty(512, 512)
    rows = rows_of(512, 512, 1024, config, split_k)
    matmul = Matmul(config, rows, a.bfloat16(), b.bfloat16(), out.bfloat16())
    assert matmul.shares is not None
    assert matmul.shares.partials.numel() == sum(row.shares > 0 for row in rows) * config.block_m * config.block_n
    matmul.run = lambda: matmul.launch.start(0)  # type: ignore[method-assign]
    matmul()
    assert {matmul.shares.partials.data_ptr(), matmul.shares.arrivals.data_ptr()} <= launched[-1].addresses
