"""What of the watcher needs no GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overweave.errors import OverweaveError, PeerError, PeerTimeout

watcher = pytest.importorskip("overweave.memory.watcher", reason="needs cuda-bindings")
Workspace = pytest.importorskip("overweave.memory.workspace").Workspace


def test_a_reason_that_comes_late_is_heard():
    late = PeerTimeout("call 3", "rank 2 is late", "Find it")
    answers: list[OverweaveError | None] = [None, None, late]
    assert watcher.reason_within(5.0, lambda: answers.pop(0)) is late
    assert not answers


def test_no_reason_ends():
    asked = []
    assert watcher.reason_within(0.05, lambda: asked.append(1)) is None
    assert len(asked) >= 2


class Peer:
    """A board that shows an alarm until it is taken back."""

    has_alarm = True

    def check(self) -> None:
        if self.has_alarm:
            raise PeerError("call 3", "a peer gave up", "")


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    monkeypatch.setattr(watcher.Watcher, "_run", lambda self: None)
    monkeypatch.setattr(watcher.Watcher, "_end_all_waits", lambda self: ended.append(self))
    ended: list[Any] = []
    idle = SimpleNamespace(
        ended=ended, device=None, calls=0, timeout_s=1.0, reported_alarm=lambda: None, is_idle=lambda: True
    )
    return watcher.Watcher(idle, Peer())


def test_its_stream_shares_its_priority_with_no_side_stream(looking: Any, monkeypatch: pytest.MonkeyPatch):
    """Nor with callers' own: what waits on one may hold up others of the same priority."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: priority)
    workspace = object.__new__(Workspace)
    workspace.device, workspace._streams = torch.device("cuda", 0), {}
    assert watcher.Watcher(looking._workspace, looking._board)._stream not in (workspace.stream("copies"), 0)


def test_trouble_stays_until_it_is_forgotten(looking: Any):
    assert looking.look() is looking.look() is not None
    looking._board.has_alarm = False
    assert looking.look() is not None
    with looking.forgetting():
        pass
    assert looking.look() is None


def test_alarms_of_peers_that_are_behind_in_a_reset_are_not_heeded(looking: Any):
    with looking.forgetting():
        beside = threading.Thread(target=looking.look)
        beside.start()
        beside.join(0.1)
        looking._board.has_alarm = False
    beside.join()
    assert looking.trouble is None
    assert not looking._workspace.ended


def test_a_reset_that_fails_forgets_nothing(looking: Any):
    looking.look()
    with pytest.raises(PeerTimeout), looking.forgetting():
        raise PeerTimeout("reset", "rank 1 is late", "")
    assert looking.trouble is not None


def test_waits_are_ended_again_until_the_last_call_has_ended(looking: Any):
    looking._workspace.is_idle = lambda: False
    looking.look()
    looking.look()
    assert len(looking._workspace.ended) == 2
    looking._workspace.is_idle = lambda: True
    looking.look()
    assert len(looking._workspace.ended) == 2


def test_the_first_trouble_ends_waits_also_of_calls_that_others_replay(looking: Any):
    looking.look()
    assert looking._workspace.ended == [looking]
