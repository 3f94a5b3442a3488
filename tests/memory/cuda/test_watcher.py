"""What of the watcher needs no GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overweave.errors import MachineError, OverweaveError, PeerError, PeerTimeout

watcher = pytest.importorskip("overweave.memory.cuda.workspace", reason="needs cuda-bindings")
Workspace = pytest.importorskip("overweave.memory.cuda.workspace").Workspace


def test_a_reason_that_comes_late_is_heard():
    late = PeerTimeout("call 3", "rank 2 is late", "Find it")
    answers: list[OverweaveError | None] = [None, None, late]
    assert watcher.poll_within(5.0, lambda: answers.pop(0)) is late
    assert not answers


def test_no_reason_ends():
    asked = []
    assert watcher.poll_within(0.05, lambda: asked.append(1)) is None
    assert len(asked) >= 2


class Peer:
    """A board that shows an alarm until it is taken back."""

    has_alarm = True

    def check(self) -> None:
        if self.has_alarm:
            raise PeerError("call 3", "a peer gave up", "")


class Stream:
    """A stream that has done what was put there, or holds it back."""

    cuda_stream = 7
    is_done = True

    def query(self) -> bool:
        return self.is_done


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream())
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
    assert looking.poll() is looking.poll() is not None
    looking._board.has_alarm = False
    assert looking.poll() is not None
    with looking.suspended():
        pass
    assert looking.poll() is None


def test_alarms_of_peers_that_are_behind_in_a_reset_are_not_heeded(looking: Any):
    with looking.suspended():
        beside = threading.Thread(target=looking.poll)
        beside.start()
        beside.join(0.1)
        looking._board.has_alarm = False
    beside.join()
    assert looking.failure is None
    assert not looking._workspace.ended


def test_a_reset_that_fails_forgets_nothing(looking: Any):
    looking.poll()
    with pytest.raises(PeerTimeout), looking.suspended():
        raise PeerTimeout("reset", "rank 1 is late", "")
    assert looking.failure is not None


def test_waits_are_ended_again_until_the_last_call_has_ended(looking: Any):
    looking._workspace.is_idle = lambda: False
    looking.poll()
    looking.poll()
    assert len(looking._workspace.ended) == 2
    looking._workspace.is_idle = lambda: True
    looking.poll()
    assert len(looking._workspace.ended) == 2


def test_the_first_trouble_ends_waits_also_of_calls_that_others_replay(looking: Any):
    looking.poll()
    assert looking._workspace.ended == [looking]


def test_waits_are_ended_again_while_the_own_stream_holds_the_writes_back(looking: Any):
    looking.poll()
    looking._stream.is_done = False
    looking.poll()
    assert len(looking._workspace.ended) == 2


ABORT, SIGNALS, CONTEXT = 4096, [8192, 8320], 70  # addresses, and the stream of the other context


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watcher that ends waits. written: (stream, address) of every word."""
    written: list[tuple[int, int]] = []

    def write_values(stream: int, addresses: list[int], value: int) -> None:
        written.extend((stream, address) for address in addresses)

    @contextmanager
    def own_context(device: int) -> Iterator[int]:
        if not made.has_memory:
            raise MachineError("cuCtxCreate", "out of memory", "")
        yield CONTEXT

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream())
    monkeypatch.setattr(watcher.Watcher, "_run", lambda self: None)
    monkeypatch.setattr(watcher.driver, "write_value", lambda stream, address, value: written.append((stream, address)))
    monkeypatch.setattr(watcher.driver, "write_values", write_values)
    monkeypatch.setattr(watcher.driver, "own_context", own_context)
    monkeypatch.setattr(watcher.time, "monotonic", lambda: made.now_s)
    device = torch.device("cuda", 0)
    own: Any = SimpleNamespace(device=device, abort_address=lambda: ABORT, signal_addresses=lambda: SIGNALS)
    made: Any = watcher.Watcher(own, Peer())
    made.written, made.has_memory, made.now_s = written, True, 100.0
    return made


def everything(stream: int) -> list[tuple[int, int]]:
    """The abort word before all signals: who sees these finds the call void."""
    return [(stream, ABORT), *((stream, signal) for signal in SIGNALS)]


def test_waits_are_ended_by_writes_of_the_own_stream(ending: Any):
    ending._end_all_waits()
    assert ending.written == everything(Stream.cuda_stream)


def test_what_the_own_stream_holds_back_another_context_writes(ending: Any):
    ending._end_all_waits()
    ending._stream.is_done = False
    ending.now_s += watcher.WATCH_EVERY_S
    ending._end_all_waits()
    assert ending.written == everything(Stream.cuda_stream) + everything(CONTEXT)


def test_writes_of_a_moment_ago_are_not_held_back(ending: Any):
    ending._end_all_waits()
    ending._stream.is_done = False
    ending._end_all_waits()
    assert ending.written == everything(Stream.cuda_stream)


def test_without_memory_for_a_context_a_later_look_has_it(ending: Any):
    ending._stream.is_done = ending.has_memory = False
    ending._end_all_waits()
    assert not ending.written
    ending.has_memory = True
    ending._end_all_waits()
    assert ending.written == everything(CONTEXT)


def test_many_words_take_several_calls_of_the_driver(monkeypatch: pytest.MonkeyPatch):
    calls: list[list[int]] = []

    def batch(stream: int, count: int, writes: list[Any], flags: int) -> tuple[int]:
        assert count == len(writes) < 256  # as the driver asks
        calls.append([int(write.writeValue.address) for write in writes])
        return (watcher.driver.driver.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(watcher.driver.driver, "cuStreamBatchMemOp", batch)
    addresses = list(range(0, 700 * 128, 128))
    watcher.driver.write_values(7, addresses, 1)
    assert [each for call in calls for each in call] == addresses
    assert len(calls) == 3
    watcher.driver.write_values(7, [], 1)
    assert len(calls) == 3
