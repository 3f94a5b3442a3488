"""GPUs that reach each other's memory, and those that do not: what memory a group gets, and what its calls wait for."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

heap = pytest.importorskip("overweave.memory.cuda.heap", reason="no CUDA bindings here")
from overweave.errors import MachineError, RankMismatch  # noqa: E402
from overweave.memory.board.board import Board  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.memory.heap import ranks_in_reach  # noqa: E402
from overweave.runtime.kernel_calls.call import (  # noqa: E402
    connected_ranks,
    prologue_call,
    require_peer_access,
    signal_words,
)
from tests.islands import on_islands  # noqa: E402
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
    for asked in ("group_has_peer_access", "islands_have_peer_access"):
        monkeypatch.setattr(heap, asked, lambda group, device: False)
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


@pytest.mark.parametrize(("rank", "addresses", "place"), [(1, (24, 24, 24, 32), 0), (3, (32, 24, 32, 32), 1)])
def test_ranks_of_an_island_begin_together(rank: int, addresses: tuple[int, ...], place: int):
    words: Any = SimpleNamespace(addresses=addresses, tensor=torch.zeros(1 << 12, dtype=torch.uint8))
    words.view = lambda offset, shape, dtype: words.tensor[offset:].view(dtype)[: shape[0]]
    group, limits = SimpleNamespace(rank=rank, world_size=4), torch.zeros(4, dtype=torch.int64)
    workspace: Any = SimpleNamespace(words=words, group=group, limits=limits, state=None, claims=None)
    protocol = signal_words(workspace, words, 3)
    assert prologue_call(workspace, protocol, 3).arguments[-4:-1] == [3, place, 2]
    require_peer_access(workspace, "a plan of islands", {1, 3})
    with pytest.raises(MachineError, match="do not reach each other's memory"):
        require_peer_access(workspace, "a plan of islands", {2})


def of_islands() -> list[object]:
    """Where a rank's memory lies and where it sees that of the others, and whose it reaches, if torch maps memory among
    the ranks of the group that it is given."""

    def rendezvous(tensor: torch.Tensor, process_group: dist.ProcessGroup) -> object:
        starts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(process_group))]
        dist.all_gather(starts, torch.tensor([tensor.data_ptr()]), group=process_group)
        return SimpleNamespace(buffer_ptrs=[int(start) for start in starts])

    def empty(size: int, **options: Any) -> torch.Tensor:
        """At an address of its own: forked ranks may allocate at the same one, which no two mappings of a rank have."""
        return torch.empty(size + 64, **options)[16 * dist.get_rank() :][:size]

    group, mapping = resolve(None), SimpleNamespace(empty=empty, rendezvous=rendezvous)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heap, "islands_have_peer_access", lambda group, device: True)
        patch.setattr(heap, "symmetric_memory", mapping)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        words = heap.allocate_heap(group, CPU, 1 << 12)
    return [words.tensor.data_ptr(), list(words.addresses), ranks_in_reach(words.addresses, group.rank)]


def test_ranks_of_an_island_share_memory():
    (first, of_first, with_first), (second, of_second, with_second), (last, of_last, with_last) = run_ranks(
        on_islands, 3, "aab", of_islands
    )
    assert of_first == [first, second, first]
    assert of_second == [first, second, second]
    assert of_last == [last] * 3
    assert (with_first, with_second, with_last) == ([0, 1], [0, 1], [2])


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
