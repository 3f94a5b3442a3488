"""What a launch of the tile kernels is given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from overweave.ir.plan import ReduceConfig, SkinnyConfig
from overweave.ir.problem import Problem
from overweave.ir.schedule import Compute
from overweave.memory.cuda.heap import OVERLAPPING
from overweave.memory.split_k import SharedShares
from overweave.process_settings import settings
from overweave.runtime.gpu.bound import free_sms
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.kernel_calls.bind import LINK_INTERVAL_NS, STRIP_BYTES, peer_store_interval_ns
from overweave.runtime.kernel_calls.matmul import hopper_boxes, hopper_strip
from overweave.runtime.kernel_calls.packed import SkinnyOperands, skinny_call
from overweave.runtime.kernel_calls.sums_and_copies import reduction_programs
from overweave.schedules.catalog.catalog import build
from overweave.schedules.tiles.shape import FLOAT8_HOPPER, HOPPER, SHAPES, TileShape
from tests.runtime.without_gpu import SHARED_BYTES, Launched, launched


@pytest.mark.parametrize("shape", [*HOPPER, *FLOAT8_HOPPER], ids=lambda shape: str(shape.config))
def test_what_leaves_for_a_peer_is_whole_strips(shape: TileShape):
    """Rows of a strip are rows of swizzled shared memory, whose patterns are 8 rows high."""
    (rows, cols), (high, wide) = hopper_boxes(shape.config), hopper_strip(shape.config)
    assert (rows % high, high % 8, cols % wide) == (0, 0, 0)
    assert wide in (32, 64)


@pytest.mark.parametrize(("allowed", "tiles", "sums"), [("0", 132, 528), ("1", 124, 32)])
def test_kernels_that_wait_leave_sms_to_copies_between_ranks_of_one_gpu(
    allowed: str, tiles: int, sums: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setenv(OVERLAPPING, allowed)
    assert free_sms(torch.device("cuda"), 0) == tiles
    assert free_sms(torch.device("cuda"), 8) == tiles - 8
    with settings(sm_margin=16):
        assert free_sms(torch.device("cuda"), 8) == tiles - 24
    assert reduction_programs(ReduceConfig(), 1000) == sums


# The matmul of few rows, bound as on a GPU: it compiles with the very arguments of a launch.

__all__ = ["launched"]  # a fixture

CONFIG = SkinnyConfig(block_m=16, block_n=32, block_k=128, splits=3)


@pytest.mark.slow
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


SMS = 132


def pace(
    operator: str,
    world_size: int,
    waves: float,
    strip_bytes: int = STRIP_BYTES,
    k: int = 4096,
    dtype: str = "bfloat16",
) -> int:
    problem = Problem(operator=operator, m=8192, n=8192, k=k, world_size=world_size, dtype=dtype)
    plan = build(f"{operator}.ring_stored", problem, {})
    return peer_store_interval_ns(
        problem, (each for each in plan.schedule.of_rank(0) if isinstance(each, Compute)), waves, strip_bytes
    )


def test_strips_come_as_fast_as_the_link_takes_them():
    """Between what stores of all SMs reached together, and what the link is made for, both in GB/s."""
    assert [pace("matmul_reduce_scatter", size, 3.9) for size in (2, 3, 4)] == [LINK_INTERVAL_NS] * 3
    assert 310 < SMS * STRIP_BYTES / LINK_INTERVAL_NS < 450


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("k", [5504, 7168, 14336])
def test_strips_of_a_long_tile_take_about_half_of_its_time(k: int, world_size: int):
    """A tile of 128 x 256 takes 0.66 us for each 64 of k, and has 32 strips."""
    half_ns = 0.66e3 * k / 64 / 2
    assert 0.9 * half_ns < 32 * pace("matmul_reduce_scatter", world_size, 3.9, k=k) < 1.1 * half_ns


@pytest.mark.slow
def test_numbers_of_twice_the_size_take_twice_as_long():
    pair = [pace("matmul_reduce_scatter", 4, 3.9, k=7168, dtype=dtype) for dtype in ("float32", "bfloat16")]
    assert pair[0] == 2 * pair[1]


def test_smaller_strips_come_faster():
    assert pace("matmul_reduce_scatter", 4, 3.9, 1024) == LINK_INTERVAL_NS // 2


@pytest.mark.parametrize("waves", [0.1, 0.97])
def test_nobody_waits_where_the_next_rank_waits_for_each_tile(waves: float):
    assert pace("matmul_reduce_scatter", 4, waves) == 0


@pytest.mark.slow
def test_sums_for_several_peers_leave_at_once():
    assert pace("matmul_all_reduce", 2, 3.9) == LINK_INTERVAL_NS
    assert [pace("matmul_all_reduce", size, 3.9) for size in (3, 4, 8)] == [0, 0, 0]
