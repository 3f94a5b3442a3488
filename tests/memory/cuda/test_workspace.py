"""What a workspace waits for before it makes or grows anything, and how it is found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overweave.errors import PeerDied
from overweave.memory.layout import SlotLayout

workspace = pytest.importorskip("overweave.memory.cuda.workspace", reason="no CUDA bindings here")
GPU = torch.device("cuda", 3)
LAYOUT = SlotLayout(signals=1, pads={}, buffers={}, size_bytes=1 << 20)


@pytest.fixture
def own() -> Any:
    """The workspace of a group on the GPU, as far as it settles."""
    made = object.__new__(workspace.Workspace)
    made.chain = SimpleNamespace(last_call=None)
    made._watcher, made._report, made._in_reach = SimpleNamespace(failure=None), [0] * 64, tuple(range(8))
    return made


def test_a_workspace_is_found_by_its_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever GPU is current: `check` and `reset` come from any thread."""
    groups = [SimpleNamespace(process_group=object()) for _ in range(3)]
    kept = {(groups[1].process_group, GPU): "theirs", (groups[0].process_group, GPU): "own"}
    monkeypatch.setattr(workspace.Workspace, "_open", kept)
    assert [workspace.Workspace.existing(group) for group in groups] == ["own", "theirs", None]


class Call:
    """An event behind a call that ends at a look at it, the `looks`-th; each look finds `trouble` in a workspace."""

    def __init__(self, looks: int, watched: Any = None, trouble: Exception | None = None) -> None:
        self.looks, self.watched, self.trouble = looks, watched, trouble

    def query(self) -> bool:
        self.looks -= 1
        if self.watched is not None:
            self.watched.failure = self.trouble
        return self.looks <= 0


def test_it_settles_when_the_last_call_of_any_group_has_ended(own: Any) -> None:
    own.drain()  # there is none yet
    own.chain.last_call = theirs = Call(3)
    own.drain()
    assert theirs.looks == 0


def test_who_settles_hears_of_a_peer_that_died(own: Any) -> None:
    """The call itself ends only when the watcher has ended its waits."""
    own._watcher = SimpleNamespace(failure=None, poll=lambda: own._watcher.failure)
    own.chain.last_call = Call(1000, own._watcher, PeerDied("call 3", "rank 1 ended", "Start it anew"))
    with pytest.raises(PeerDied, match="rank 1 ended"):
        own.drain()


def test_calls_have_ended_before_memory_grows(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where it is large enough: plans are also bound under capture, where no event may be asked for."""
    done: list[str] = []

    def space(heap: object, device: torch.device, half_bytes: int) -> Any:
        done.append("space")
        return SimpleNamespace(half_bytes=half_bytes)

    def heap(group: object, device: torch.device, size_bytes: int) -> Any:
        done.append("heap")
        return SimpleNamespace(tensor=torch.empty(size_bytes, dtype=torch.uint8))

    own.group, own.device, own._heaps, own._packed = None, GPU, [], []
    own._most_signals = 0
    monkeypatch.setattr(own, "drain", lambda: done.append("settled"), raising=False)
    monkeypatch.setattr(workspace, "allocate_heap", heap)
    monkeypatch.setattr(workspace, "CudaHeap", heap)
    monkeypatch.setattr(workspace, "PackedSpace", space)
    for _ in range(2):
        own.lease(LAYOUT)
        own.packed_space(1 << 20)
    assert done == ["settled", "heap", "settled", "heap", "space"]


def test_the_watcher_is_told_of_every_signal_that_a_plan_may_wait_for(own: Any) -> None:
    """In the memory that plans bound earlier have kept, too."""
    own.group, own._most_signals = SimpleNamespace(rank=1), 0
    own._heaps = [
        SimpleNamespace(addresses=(place, place + (1 << 30)), tensor=torch.empty(size, dtype=torch.uint8))
        for place, size in ((1 << 32, 1 << 20), (1 << 40, 1 << 21))
    ]
    layout = SlotLayout(signals=5, pads={"arrived": 0, "sums": 3}, buffers={}, size_bytes=1 << 20)
    assert own.lease(layout) is own._heaps[-1]
    words = {heap.addresses[1] + layout.signal_offset(*each) for heap in own._heaps for each in SIGNALS}
    assert sorted(own.signal_addresses()) == sorted(words)


SIGNALS = [("arrived", 0), ("arrived", 1), ("arrived", 2), ("sums", 0), ("sums", 1)]


@pytest.mark.parametrize(
    ("operation", "said", "peer"),
    [
        (-1, "begin: it has not begun this call", 7),
        (-2, "its messages of packed call 9 did not come", 7),
        (-3, "a queue waits for signal 7", -1),
        (0, "operation 0 waits for signal 7", -1),
        (5, "operation 5 waits for signal 7", -1),
    ],
)
def test_a_report_says_who_waits_for_what(own: Any, operation: int, said: str, peer: int) -> None:
    assert own.reported_alarm() is None
    own._report[:5] = [1, operation, 7, 9, 4]
    alarm = own.reported_alarm()
    assert (alarm.rule, alarm.operation, alarm.peer) == ("timeout", said, peer)
    own._report[0] = 2  # a peer tells
    assert own.reported_alarm() is None
