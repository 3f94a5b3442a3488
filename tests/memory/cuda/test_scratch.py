"""Scratch memory grows when it must, and passes from stream to stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overweave.memory.cuda import heap
from overweave.memory.cuda.heap import Scratch

CPU = torch.device("cpu")


class Heap:
    """Stands for symmetric memory: how much was asked for."""

    def __init__(self, group: object, device: torch.device, size_bytes: int) -> None:
        self.size_bytes = size_bytes


class Stream:
    """Remembers for whom it waits."""

    def __init__(self) -> None:
        self.waits: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Scratch:
    monkeypatch.setattr(heap, "CudaHeap", Heap)
    monkeypatch.setattr("overweave.memory.cuda.streams.cuda_getCurrentRawStream", lambda index: 0)
    return Scratch(None, CPU)  # type: ignore[arg-type]


def test_it_grows_in_few_steps_and_what_was_handed_out_stays(own: Scratch):
    own.reserve(1000)
    first: Any = own.heap
    own.reserve(1024)
    assert own.heap is first
    own.reserve(1025)
    grown: Any = own.heap
    own.reserve(7)
    assert own.heap is grown
    assert [vars(heap)["size_bytes"] for heap in (first, grown)] == [1024, 2048]


def test_a_call_on_another_stream_waits_for_the_last_one(own: Scratch):
    own.reserve(16)
    one, other = Stream(), Stream()
    for stream in (one, one, other, other, one):
        assert own.enter(stream) is own.heap  # type: ignore[arg-type]
    assert (one.waits, other.waits) == ([other], [one])
