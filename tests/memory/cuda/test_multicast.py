"""Whether a GPU has multicast, as the driver tells it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from overweave.memory.cuda import card


@pytest.mark.parametrize(("answer", "value", "has"), [(0, 1, True), (0, 0, False), (1, 1, False)])
def test_the_driver_says(monkeypatch: pytest.MonkeyPatch, answer: int, value: int, has: bool):
    asked = []

    def attribute(found, kind: int, index: int) -> int:
        asked.append((kind, index))
        found._obj.value = value
        return answer

    driver = SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGetAttribute=attribute)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    card.has_multicast.cache_clear()
    assert card.has_multicast(torch.device("cuda", 3)) == has
    assert asked == [(132, 3)]
    card.has_multicast.cache_clear()


def test_without_a_driver_there_is_none():
    card.has_multicast.cache_clear()
    assert not card.has_multicast(torch.device("cuda", 0))
