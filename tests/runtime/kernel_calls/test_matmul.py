"""What a launch of the tile kernels is given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from overweave.ir.plan import ReduceConfig
from overweave.memory.cuda.heap import OVERLAPPING
from overweave.runtime.gpu.bound import free_sms
from overweave.runtime.kernel_calls.matmul import hopper_boxes, hopper_strip
from overweave.runtime.kernel_calls.sums_and_copies import reduction_programs
from overweave.schedules.tiles.shape import FLOAT8_HOPPER, HOPPER, TileShape


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
    assert reduction_programs(ReduceConfig(), 1000) == sums
