"""GPUs that reach each other's memory, and those that do not: what memory a group gets, and what its calls wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

heap = pytest.importorskip("overweave.memory.cuda.heap", reason="no CUDA bindings here")
from overweave.memory.cuda import peer_access  # noqa: E402
from overweave.runtime.kernel_calls.protocol import head_call, ranks_in_reach, signal_words  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize(("cut", "found"), [((), True), (((0, 2),), True), (((1, 2),), False), (((2, 1),), False)])
def test_a_gpu_asks_of_every_other_in_both_directions(cut: Any, found: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) not in cut)
    assert peer_access.has_peer_access.__wrapped__(torch.device("cuda", 1)) is found


def test_of_one_gpu_nothing_is_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert peer_access.has_peer_access.__wrapped__(torch.device("cuda", 0))


@pytest.mark.parametrize(("ranks", "in_reach"), [(4, 1), (1, 1)])
def test_without_peer_access_a_call_begins_by_itself(ranks: int, in_reach: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heap, "has_peer_access", lambda device: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    group = SimpleNamespace(rank=ranks - 1, world_size=ranks)
    words = heap.heap_of(group, CPU, 1 << 12)
    assert words.addresses == (words.tensor.data_ptr(),) * ranks
    limits = torch.zeros(2 + ranks, dtype=torch.int64)
    workspace: Any = SimpleNamespace(words=words, group=group, limits=limits, state=None, claims=None)
    assert ranks_in_reach(workspace) == in_reach
    protocol = signal_words(workspace, words, 3)
    _, rank, world_size, _ = head_call(workspace, protocol, 3).arguments[-4:]
    assert (rank, world_size) == (0, in_reach)


def test_ranks_that_reach_each_other_begin_together():
    workspace: Any = SimpleNamespace(words=SimpleNamespace(addresses=(8, 16, 24)))
    assert ranks_in_reach(workspace) == 3
