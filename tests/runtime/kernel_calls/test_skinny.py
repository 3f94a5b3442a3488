"""The matmul of few rows, bound as on a GPU: it compiles with the very arguments of a launch."""

from __future__ import annotations

import pytest
import torch

from overweave.ir.plan import SkinnyConfig
from overweave.memory.split_k import SharedShares
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.kernel_calls.packed import SkinnyOperands, skinny_call
from overweave.schedules.tiles.shape import SHAPES
from tests.runtime.without_gpu import SHARED_BYTES, Launched, launched

__all__ = ["launched"]  # a fixture
pytestmark = pytest.mark.slow

CONFIG = SkinnyConfig(block_m=16, block_n=32, block_k=128, splits=3)


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("config", [CONFIG, *SHAPES], ids=["shares", *(f"{one.block_m} rows" for one in SHAPES)])
def test_alone(launched: list[Launched], config: SkinnyConfig, is_transposed: bool) -> None:
    m, n, k = 5, 72, 264
    a, out = torch.empty(m, k).bfloat16(), torch.empty(m, n).bfloat16()
    b = torch.empty(n, k).bfloat16().t() if is_transposed else torch.empty(k, n).bfloat16()
    memory = SharedShares(a.device)
    launch = Launch(skinny_call(config, SkinnyOperands(a, b, out), memory))
    launch.start(0)
    assert launched == ["skinny_matmul_kernel"]
    assert {tensor.data_ptr() for tensor in (a, b, out)} <= launched[-1].addresses
    if config.splits > 1:
        shares = memory.get(2 * 3, config.block_m * config.block_n)
        assert {shares.partials.data_ptr(), shares.arrivals.data_ptr()} <= launched[-1].addresses
        assert shares.partials.numel() == 3 * 3 * config.block_m * config.block_n
    assert launch.compiled.metadata.shared <= SHARED_BYTES
