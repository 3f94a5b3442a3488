"""What of the watcher needs no GPU."""

from __future__ import annotations

import pytest

from overweave.errors import OverweaveError, PeerTimeout

watcher = pytest.importorskip("overweave.memory.watcher", reason="needs cuda-bindings")


def test_a_reason_that_comes_late_is_heard():
    late = PeerTimeout("call 3", "rank 2 is late", "Find it")
    answers: list[OverweaveError | None] = [None, None, late]
    assert watcher.reason_within(5.0, lambda: answers.pop(0)) is late
    assert not answers


def test_no_reason_ends():
    asked = []
    assert watcher.reason_within(0.05, lambda: asked.append(1)) is None
    assert len(asked) >= 2
