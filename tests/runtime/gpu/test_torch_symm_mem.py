"""torch's all-reduces as plans of ours, on streams, graphs and symmetric memory that only write down what is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overweave.ir.problem import Problem
from overweave.runtime.gpu import torch_symm_mem as by_torch
from overweave.schedules.records.outside import OUTSIDE, TORCH_TWO_SHOT

M, N, K = 4, 6, 5
PROBLEM = Problem(operator="matmul_all_reduce", m=M, n=N, k=K, world_size=2, dtype="float32")


class Heap:
    """Memory of this rank."""

    def __init__(self) -> None:
        self.memory = torch.zeros(M * N)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.memory.view(shape)


class Scratch:
    """Hands out a heap, which may become another, and makes graphs."""

    def __init__(self, log: list[str]) -> None:
        self.heap, self.log, self.captures = Heap(), log, self

    def reserve(self, size_bytes: int) -> None:
        assert size_bytes == M * N * 4

    def current_stream(self) -> str:
        return "caller"

    def enter(self, stream: str) -> None:
        self.log.append(f"enter {stream}")

    def graph(self, enqueue: Any) -> Any:
        self.log.append("capture")
        enqueue("graph")
        return SimpleNamespace(replay=lambda: self.log.append("replay"))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    scratch = Scratch(log)
    monkeypatch.setattr(by_torch, "load", lambda name: SimpleNamespace(of=lambda group, device: scratch))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def doubled(partial: torch.Tensor, function: str, group: str, y: torch.Tensor) -> None:
        log.append(function)
        y.copy_(2 * partial)

    operators = SimpleNamespace(two_shot_all_reduce_out=doubled)
    monkeypatch.setattr(torch.ops, "symm_mem", operators, raising=False)
    return log


def made() -> Any:
    group: Any = SimpleNamespace(name="a group")
    return by_torch.AllReduceRun(OUTSIDE[TORCH_TWO_SHOT].curve, PROBLEM, group, torch.device("cpu"))


def tensors() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(M, K), "w": torch.randn(K, N), "y": torch.zeros(M, N)}


def told(call: Any, given: dict[str, torch.Tensor], log: list[str]) -> list[str]:
    """What a call does; what it computes must be right."""
    given["y"].zero_()
    call(given)
    found = list(log)
    log.clear()
    if "replay" not in found or "capture" in found:
        assert torch.allclose(given["y"], 2 * given["x"] @ given["w"])
    return found


def test_a_call_whose_tensors_come_back_is_a_graph(log: list[str]) -> None:
    call, here, there = made(), tensors(), tensors()
    assert told(call, here, log) == ["enter caller", "sum"]
    assert told(call, there, log) == ["enter caller", "sum"]
    assert told(call, here, log) == ["enter caller", "capture", "sum", "replay"]
    assert told(call, here, log) == ["enter caller", "replay"]
    assert told(call, there, log) == ["enter caller", "capture", "sum", "replay"]


def test_graphs_go_with_the_memory_that_they_know(log: list[str]) -> None:
    call, here = made(), tensors()
    for _ in range(3):
        told(call, here, log)
    call._scratch.heap = Heap()
    assert told(call, here, log) == ["enter caller", "sum"]
    assert torch.equal(call._partial, here["x"] @ here["w"])
    assert told(call, here, log) == ["enter caller", "capture", "sum", "replay"]


def test_what_the_caller_captures_is_enqueued_and_keeps_its_memory(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, here = made(), tensors()
    assert not call.was_captured
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    heaps = [call._scratch.heap, Heap()]
    for heap in heaps:
        call._scratch.heap = heap
        for _ in range(3):
            assert told(call, here, log) == ["sum"]
    assert call.was_captured
    assert call._captured_heaps == heaps
