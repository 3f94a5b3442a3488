"""Packed plans bound as on a GPU, without one: their kernels compile with the very arguments of a launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overweave.ir.plan import Problem
from overweave.memory.packed_layout import HALVES, lay_out_packed
from overweave.memory.packed_space import PackedSpace
from overweave.runtime.packed import PackedRun
from overweave.schedules.catalog import build
from tests.runtime.without_gpu import CALLER, launched, workspace

__all__ = ["launched"]  # a fixture

KERNELS = {"one_shot_packed": "packed_all_reduce_kernel", "two_shot_packed": "packed_two_shot_kernel"}


class HostHeap:
    """Memory of two ranks on the host, in place of the symmetric one."""

    def __init__(self, group: Any, device: torch.device, size_bytes: int) -> None:
        self.tensor = torch.zeros(size_bytes, dtype=torch.uint8)
        self.addresses = [self.tensor.data_ptr()] * group.world_size


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("m", [1, 64, 509])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_with_the_arguments_of_a_launch(
    name: str, m: int, rank: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ints that are one or divide by 16 are special to the compiler; so are ranks that own no rows."""
    monkeypatch.setattr("overweave.memory.packed_space.CudaHeap", HostHeap)
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    problem = Problem(operator="matmul_all_reduce", m=m, n=72, k=16, world_size=2, dtype="bfloat16")
    plan = build(f"matmul_all_reduce.{name}", problem, {})
    host = workspace()
    host.group = SimpleNamespace(rank=rank, world_size=2)
    space = PackedSpace(host.group, host.device, lay_out_packed(plan).half_bytes)
    host.packed_space = lambda half_bytes: space
    host.current_stream = lambda: CALLER
    shapes = {"x": (m, 16), "w": (16, 72), "y": (m, 72)}
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    PackedRun(plan, host, tensors)(tensors)
    assert launched == [KERNELS[name]]
    assert torch.equal(space.product((m, 72), torch.bfloat16), torch.full((m, 72), 16.0, dtype=torch.bfloat16))
    assert space._heap.tensor.numel() == HALVES * lay_out_packed(plan).half_bytes
