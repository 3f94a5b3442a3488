"""torch's rendezvous of our memory makes no multicast object, and the environment is as before."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from overweave.errors import MachineError
from overweave.hardware.multicast import BY_TORCH, WITHOUT
from overweave.memory.cuda import heap

GROUP = SimpleNamespace(name="0", process_group=None, world_size=1)


def mapped(monkeypatch: pytest.MonkeyPatch, rendezvous) -> None:
    monkeypatch.setattr(symmetric_memory, "empty", lambda size, **options: torch.ones(size, dtype=torch.uint8))
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    heap.CudaHeap(GROUP, torch.device("cpu"), 16)


@pytest.mark.parametrize("said", [None, "0", "1"])
def test_torch_is_told_for_the_one_call(monkeypatch: pytest.MonkeyPatch, said: str | None):
    heard = []

    def rendezvous(tensor, group):
        heard.append(os.environ.get(BY_TORCH))
        return SimpleNamespace(buffer_ptrs=(1, 2))

    monkeypatch.delenv(BY_TORCH, raising=False)
    if said is not None:
        monkeypatch.setenv(BY_TORCH, said)
    before = dict(os.environ)
    mapped(monkeypatch, rendezvous)
    assert heard == [WITHOUT[BY_TORCH]]
    assert dict(os.environ) == before


def test_a_rendezvous_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch):
    def rendezvous(tensor, group):
        raise RuntimeError("no peer")

    monkeypatch.delenv(BY_TORCH, raising=False)
    with pytest.raises(MachineError, match="no peer"):
        mapped(monkeypatch, rendezvous)
    assert BY_TORCH not in os.environ


def test_threads_that_meet_several_groups_neither_wait_nor_undo_each_other(monkeypatch: pytest.MonkeyPatch):
    """The first to come is the first to go: the second is told as long as it is under way."""
    monkeypatch.delenv(BY_TORCH, raising=False)
    entered, leave, heard = threading.Barrier(3, timeout=20), [threading.Event(), threading.Event()], []

    def meet(index: int) -> None:
        with heap._unicast():
            entered.wait()
            leave[index].wait(20)
            heard.append(os.environ.get(BY_TORCH))

    threads = [threading.Thread(target=meet, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    entered.wait()
    for index, thread in enumerate(threads):
        leave[index].set()
        thread.join(20)
    assert heard == [WITHOUT[BY_TORCH]] * 2
    assert BY_TORCH not in os.environ
