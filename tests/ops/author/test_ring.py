"""Matrices passed on in a ring: the program of a hop is proven, mutants are refused, and memory does not grow."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from overweave.ir.verify.plan import verify_schedule
from overweave.ops.author.proven_program import Kernels
from overweave.ops.author.ring import HopProgram, MatrixRing
from overweave.ops.author.tile_program import TileQueue
from overweave.ops.call.groups import group_of
from tests.ranks import run_ranks


def refusals(ranks: int = 3, count: int = 2) -> set[str]:
    schedule = HopProgram(ranks, 5, 64, (torch.bfloat16,) * count).schedule()
    return {refusal.rule for refusal in verify_schedule(schedule).refusals}


def test_a_hop_is_proven():
    for ranks in range(2, 9):
        for count in (1, 2, 4):
            assert refusals(ranks, count) == set(), (ranks, count)


def test_what_is_kept_before_it_has_come_is_refused():
    with patch.object(TileQueue, "rank_wait", lambda queue, name, rank: None):
        assert refusals()


def test_a_silent_sender_is_refused():
    with patch.object(TileQueue, "rank_notify", lambda queue, name, tile, rank: None):
        assert refusals()


def test_a_signal_ahead_of_its_rows_is_refused():
    honest, late = TileQueue.rank_copy_data, []

    def behind(queue: Any, source: Any, target: Any, mode: Any = "p2p") -> None:
        if queue._name == "main":
            honest(queue, source, target, mode)
        else:
            late.append((queue, source, target, mode))

    def ahead(queue: Any, name: str, tile: int, rank: Any) -> None:
        honest(*late[0])
        told(queue, name, tile, rank)
        for each in late[1:]:
            honest(*each)
        late.clear()

    told = TileQueue.rank_notify
    with patch.object(TileQueue, "rank_copy_data", behind), patch.object(TileQueue, "rank_notify", ahead):
        assert refusals()


def test_what_the_wrong_rank_sends_is_refused():
    honest = TileQueue.rank_wait
    with patch.object(TileQueue, "rank_wait", lambda queue, name, rank: honest(queue, name, (rank + 1) % 3)):
        assert refusals()


def test_symmetric_memory_is_that_of_one_shard():
    for ranks in (2, 8):
        buffers = HopProgram(ranks, 5, 64, (torch.bfloat16, torch.float32)).declared().buffers.values()
        assert sum(each.size_bytes for each in buffers) == 5 * 64 * (2 + 4)


def passed_on(hops: int) -> list[float]:
    """What a rank holds, and what it has computed on, behind so many hops."""
    rank, seen = dist.get_rank(), []
    ring = MatrixRing(group_of(None), Kernels("none", lambda own: None))
    held = [torch.full((3, 8), float(rank)), torch.full((3, 8), float(rank) + 100)]
    for _ in range(hops):
        here = held
        held = ring.passed_on(held, lambda own, here=here: seen.append(float(here[0][0, 0])))  # type: ignore[misc]
    return [float(held[0].max()), float(held[1].min()), sum(seen)]


@pytest.mark.parametrize("hops", [3, pytest.param(1000, marks=pytest.mark.nightly)])
def test_ranks_pass_on_what_they_hold(hops: int):
    for rank, (one, other, seen) in enumerate(run_ranks(passed_on, 3, hops, timeout_s=240)):
        assert one == other - 100 == (rank - hops) % 3
        assert seen == sum((rank - hop) % 3 for hop in range(hops))
