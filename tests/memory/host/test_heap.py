"""The symmetric heap of CPU ranks: what one stores all see, in any sub-group, and nothing is left behind."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from overweave.errors import MachineError
from overweave.ir.problem import Problem
from overweave.memory.board.board import Board
from overweave.memory.board.records import SharedFile
from overweave.memory.group import resolve
from overweave.memory.host.workspace import HostHeap, HostWorkspace
from overweave.memory.layout import lay_out
from overweave.runtime.host.processes import RankProcesses
from overweave.schedules.catalog import catalog
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


def write_to_peers() -> bool:
    board = Board.of(resolve(None))
    heap = HostHeap(board, 1000)
    right = (board.rank + 1) % board.world_size
    heap.view(256, (3, 5), torch.bfloat16, right).fill_(10 * board.rank)
    heap.words(512, 8, right)[4] = board.rank
    board.all_gather_bytes(b"written")
    left = (board.rank - 1) % board.world_size
    values, word = heap.view(256, (3, 5), torch.bfloat16), heap.view(528, (1,), torch.int32)
    assert values.data_ptr() == heap.addresses[board.rank] + 256 == heap.tensor.data_ptr() + 256
    return values.unique().tolist() == [10 * left] and int(word) == left and not heap.tensor[:256].any()


def test_stores_reach_the_part_they_are_meant_for():
    assert run_ranks(write_to_peers, 3) == [True] * 3


def use_sub_groups() -> list[float]:
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    seen = []
    for pair, name in zip(pairs, ("first", "second"), strict=True):
        if (
            dist.get_rank() in dist.get_process_group_ranks(pair)
            if pair != dist.GroupMember.NON_GROUP_MEMBER
            else False
        ):
            group = resolve(pair)
            heap = HostHeap(Board.of(group), 64)
            heap.view(0, (1, 4), torch.float32, 1 - group.rank).fill_(len(name) + group.rank)
            Board.of(group).all_gather_bytes(b"")
            seen.append(float(heap.view(0, (1, 4), torch.float32).mean()))
    return seen


def test_overlapping_sub_groups_do_not_meet():
    assert run_ranks(use_sub_groups, 3) == [[6.0], [5.0, 7.0], [6.0]]


def test_a_wrong_address_is_refused():
    file = SharedFile.create(4096)
    assert SharedFile.open(file.address).size_bytes == 4096
    address = bytearray(file.address)
    address[-1] ^= 1
    with pytest.raises(OSError, match="another file"):
        SharedFile.open(bytes(address))


def fail_to_map() -> str:
    board = Board.of(resolve(None))
    fails = patch.object(SharedFile, "open", side_effect=OSError("no such memory"))
    try:
        with fails if board.rank == 1 else nullcontext():
            HostHeap(board, 64)
    except MachineError as error:
        return str(error)
    return "mapped"


def test_if_one_rank_cannot_map_it_every_rank_raises():
    assert all("rank 1: no such memory" in text for text in run_ranks(fail_to_map, 3))


def grow() -> list[int]:
    group = resolve(None)
    workspace = HostWorkspace.of(group)
    descriptors = []
    for m in (8, 8, 64, 8, 400, 8, 400):
        problem = Problem(operator="all_gather_matmul", m=m, n=8, k=8, world_size=2, dtype="float32")
        plan = catalog.build("all_gather_matmul.push", problem, {})
        layout = lay_out(plan.schedule, "float32")
        workspace.board.agree(f"m={m}".encode())
        slot = workspace.begin(layout, 5.0)
        assert slot.has_reached("arrived", (0, 1), 0)
        assert not slot.has_reached("arrived", (0, 1), 1)
        workspace.board.finish()
        descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
    return descriptors


def test_growing_is_agreed_and_leaks_no_descriptor():
    for descriptors in run_ranks(grow, 2):
        assert descriptors[-1] <= descriptors[0] + 1


def map_and_wait() -> None:
    HostHeap(Board.of(resolve(None)), 1 << 20)
    time.sleep(30)


def test_nothing_is_left_after_a_kill():
    before = set(Path("/dev/shm").iterdir())
    with RankProcesses(map_and_wait, 2, group_timeout_s=20.0) as ranks:
        time.sleep(0.4)
        maps = Path(f"/proc/{ranks.processes[0]}/maps").read_text()
        assert "memfd:overweave" in maps
    assert set(Path("/dev/shm").iterdir()) == before
