"""Calls of one GPU follow each other, of whatever group and stream; the same stream needs no event for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overweave.memory.cuda.streams import Chain

workspace = pytest.importorskip("overweave.memory.cuda.workspace", reason="no CUDA bindings here")
GPU = torch.device("cuda", 3)


class Stream:
    """Remembers behind which call it waits."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def wait_event(self, event: str) -> None:
        self.waits.append(event)


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What torch has as the caller's stream: `handle`, which tests set."""
    now = SimpleNamespace(handle=1)
    monkeypatch.setattr("overweave.memory.cuda.streams.cuda_getCurrentRawStream", lambda index: now.handle)
    monkeypatch.setattr(Chain, "_of", {})
    return now


def opened(name: str) -> Any:
    """The workspace of a group on the GPU, as far as calls enter and leave it."""
    own = object.__new__(workspace.Workspace)
    own.chain, own.calls = Chain.of(GPU), 0
    own._watcher, own._report = SimpleNamespace(failure=None), [0] * 64
    own._last_call, own._record_last = name, lambda stream: None
    return own


def call(own: Any, streams: dict[int, Stream], caller: Any, handle: int) -> list[str]:
    """Behind what a call on a stream waits."""
    caller.handle, before = handle, len(streams[handle].waits)
    own.leave(own.enter())
    return streams[handle].waits[before:]


def test_calls_of_all_groups_are_one_chain(caller: Any) -> None:
    one, other = opened("one"), opened("other")
    streams = one.chain.streams
    streams |= {1: Stream(), 2: Stream()}
    assert other.chain is one.chain
    assert call(one, streams, caller, 1) == []
    assert call(other, streams, caller, 1) == []  # the stream itself keeps the order
    assert call(one, streams, caller, 2) == ["other"]
    assert call(one, streams, caller, 2) == []
    assert call(other, streams, caller, 1) == ["one"]
    assert (one.calls, other.calls) == (3, 2)


def test_gpus_have_chains_of_their_own(caller: Any) -> None:
    assert Chain.of(GPU) is Chain.of(GPU)
    assert Chain.of(GPU) is not Chain.of(torch.device("cuda", 0))
