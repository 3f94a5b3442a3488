"""GPUs that reach each other's memory, and those that do not: what memory a group gets, and what its calls wait for."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

heap = pytest.importorskip("overweave.memory.cuda.heap", reason="no CUDA bindings here")
from overweave.errors import MachineError, RankMismatch  # noqa: E402
from overweave.memory.board.board import Board  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.kernel_calls.call import (  # noqa: E402
    connected_ranks,
    prologue_call,
    require_peer_access,
    signal_words,
)
from tests.ranks import run_ranks  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize(("cut", "found"), [((), True), (((0, 2),), True), (((1, 2),), False), (((2, 1),), False)])
def test_a_gpu_asks_of_every_other_in_both_directions(cut: Any, found: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) not in cut)
    assert heap.has_peer_access.__wrapped__(torch.device("cuda", 1)) is found


def test_of_one_gpu_nothing_is_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert heap.has_peer_access.__wrapped__(torch.device("cuda", 0))


@pytest.mark.parametrize(("ranks", "in_reach"), [(4, 1), (1, 1)])
def test_without_peer_access_a_call_begins_by_itself(ranks: int, in_reach: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heap, "group_has_peer_access", lambda group, device: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    group = SimpleNamespace(rank=ranks - 1, world_size=ranks)
    words = heap.allocate_heap(group, CPU, 1 << 12)
    assert words.addresses == (words.tensor.data_ptr(),) * ranks
    limits = torch.zeros(2 + ranks, dtype=torch.int64)
    workspace: Any = SimpleNamespace(words=words, group=group, limits=limits, state=None, claims=None)
    assert connected_ranks(workspace) == in_reach
    protocol = signal_words(workspace, words, 3)
    _, rank, world_size, _ = prologue_call(workspace, protocol, 3).arguments[-4:]
    assert (rank, world_size) == (0, in_reach)
    if ranks > 1:
        with pytest.raises(MachineError, match="do not reach each other's memory"):
            require_peer_access(workspace, "a plan that addresses peers")
    else:
        require_peer_access(workspace, "a plan of one rank")


def test_ranks_that_reach_each_other_begin_together():
    workspace: Any = SimpleNamespace(words=SimpleNamespace(addresses=(8, 16, 24)))
    assert connected_ranks(workspace) == 3


def agreed(cut: tuple[tuple[int, int], ...], seen: int) -> list[object]:
    """What a rank on its GPU is told of its group, twice, and how many calls its ranks agreed on. seen: GPUs of the
    host; a rank is on the GPU of its number."""
    group = resolve(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: seen)
        patch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) not in cut)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
        device = torch.device("cuda", group.rank)
        first, again = (heap.group_has_peer_access(group, device) for _ in range(2))
    return [first, again, Board.of(group).call]


@pytest.mark.parametrize(("cut", "found"), [((), True), (((2, 0),), False), (((1, 3),), True)])
def test_all_ranks_agree_once_and_one_pair_of_their_gpus_decides(cut: Any, found: bool):
    assert run_ranks(agreed, 3, cut, 4) == [[found, found, 1]] * 3


def differs() -> str:
    """What a rank is told where rank 0 makes another call first."""
    group = resolve(None)
    if group.rank == 0:
        call: Any = partial(Board.of(group).agree, b"another call")
    else:
        call = partial(heap.group_has_peer_access, group, torch.device("cuda", group.rank))
    with pytest.raises(RankMismatch) as raised:
        call()
    return str(raised.value)


def test_a_rank_that_makes_another_call_is_named_at_once():
    assert all("another call" in each for each in run_ranks(differs, 2))
