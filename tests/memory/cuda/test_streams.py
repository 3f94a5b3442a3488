"""The caller's streams are made once, and the default one is never taken for another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from overweave.memory.cuda.streams import Streams


def test_each_stream_is_made_once_and_the_default_one_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    default, asked = SimpleNamespace(cuda_stream=0), iter([7, 0, 7, 9, 0])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda raw, device: SimpleNamespace(cuda_stream=raw))
    monkeypatch.setattr("overweave.memory.cuda.streams.cuda_getCurrentRawStream", lambda index: next(asked))
    streams = Streams(torch.device("cuda", 3))
    found = [streams.current() for _ in range(5)]
    assert [each.cuda_stream for each in found] == [7, 0, 7, 9, 0]
    assert found[0] is found[2]
    assert found[1] is found[4] is default
