"""The campaign of sums without a GPU: plans are proven, and kernels compile with what they are launched with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cuda.bindings")

from campaigns import gpu_reduction
from campaigns.sum_shapes import CASES, Sums, shapes, with_sums
from overweave.ir.verify.plan import MachineLimits, verify_plan
from tests.runtime.without_gpu import CALLER, Launched, launched, workspace

__all__ = ["launched"]  # a fixture
SMALL = ((8, 64, 1), (1, 32, 1))


@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_in_every_shape_are_proven(world_size: int) -> None:
    for case in dict.fromkeys(case._replace(rows=24, cols=80, pieces=min(case.pieces, 2)) for case in CASES):
        for config in shapes(SMALL):
            plan = with_sums(case.build(world_size), config)
            assert verify_plan(plan, MachineLimits()).ok
            assert plan.realization.reduction == config


class HostHeap:
    """Two ranks' memory, one behind the other; the other's is a copy of the own one."""

    def __init__(self, group: object, device: torch.device, size_bytes: int) -> None:
        self.tensor = torch.zeros(size_bytes, dtype=torch.uint8)
        self.addresses = (self.tensor.data_ptr(), self.tensor.data_ptr() + (1 << 40))

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = dtype.itemsize * torch.Size(shape).numel()
        return self.tensor[offset : offset + size].view(dtype).view(shape)


@pytest.mark.slow
def test_kernels_compile_with_the_arguments_of_a_launch(
    launched: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gathered(everyones: torch.Tensor, own: torch.Tensor) -> None:
        everyones.copy_(own)

    monkeypatch.setattr(gpu_reduction, "CudaHeap", HostHeap)
    monkeypatch.setattr(gpu_reduction.Workspace, "of", lambda group, device: workspace())
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_gather_into_tensor", gathered)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: CALLER)
    group: Any = SimpleNamespace(rank=0, world_size=2)
    case = Sums("matmul_all_reduce.two_shot", 24, 80, 2)
    sums = gpu_reduction.Reductions(group, torch.device("cpu"), case, 2)
    own, other = (sums.heap.tensor.data_ptr() + shift for shift in (0, 1 << 40))
    parts = [sums._buffer("partial")[:12].float()] * 2
    assert torch.equal(sums.expected[:12], (parts[0] + parts[1]).bfloat16())
    assert sums.moved_bytes == 2 * 24 * 80, "half of all operands, and of all sums, are at the peer"
    for number, config in enumerate(shapes(SMALL[:1])):
        if number < 2:
            sums.call(config, number)(3)
            pad = (number * gpu_reduction.TURNS + 3) * sums.pad_bytes
            assert own + pad in launched[-1].addresses
            table = sums._operands(with_sums(sums.plan, config, 0), number)
            assert table[3, 0, -2:].tolist() == [own + pad, other + pad], "whom the first sum's tiles tell"
            assert table[3, 1, -2:].tolist() == [0, 0], "moves tell nobody"
            assert not (table[0].numel() * 8) % 16
    ready = sums.heap.view(0, (2 * gpu_reduction.TURNS, sums.layout.signals, 32), torch.int32)
    assert ready[:, :, 0].tolist() == [[1, 0, 0, 0, 0]] * (2 * gpu_reduction.TURNS)
