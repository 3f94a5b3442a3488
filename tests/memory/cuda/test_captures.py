"""How the graphs of a workspace are made, with graphs and streams that only write down what they are asked."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from overweave.memory.cuda.streams import Captures

GPU = torch.device("cuda", 0)


class Graph:
    """pools: those that graphs were begun with. open: captures that have begun and not ended."""

    pools: list[Any]
    open = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert not gc.isenabled()
        assert capture_error_mode == "thread_local"
        Graph.pools.append(pool)
        Graph.open += 1

    def capture_end(self) -> None:
        Graph.open -= 1

    def pool(self) -> Any:
        return "pool", Graph.pools.index(None)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Graph.pools, Graph.open = [], 0
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    yield
    assert Graph.open == 0
    assert gc.isenabled()


def test_calls_have_ended_before_a_graph_is_made() -> None:
    done: list[str] = []
    Captures(GPU, lambda: done.append("settled")).graph(lambda stream: done.append("enqueued"))
    assert done == ["settled", "enqueued"]


def test_graphs_share_one_stream_and_the_memory_of_the_first() -> None:
    captures, streams = Captures(GPU, None), []
    first: Any = weakref.ref(captures.graph(streams.append))
    for _ in range(2):
        captures.graph(streams.append)
    assert Graph.pools == [None, ("pool", 0), ("pool", 0)]
    assert len(set(map(id, streams))) == 1
    assert first() is not None, "the pool would go with it"


def test_workspaces_share_neither() -> None:
    streams: list[Any] = []
    for captures in (Captures(GPU, None), Captures(GPU, None)):
        captures.graph(streams.append)
    assert Graph.pools == [None, None]
    assert streams[0] is not streams[1]


def test_a_capture_that_fails_is_ended_and_its_memory_is_not_shared() -> None:
    captures = Captures(GPU, None)

    def enqueue(stream: Any) -> None:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        captures.graph(enqueue)
    captures.graph(lambda stream: None)
    assert Graph.pools == [None, None]
