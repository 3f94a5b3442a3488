"""One program serves every routing: tokens that move between experts from call to call, and a rank that is late."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from overweave import moe
from overweave.errors import OverweaveError
from overweave.ops.author.proven_program import _BUILT
from overweave.ops.author.tile_program import TileQueue
from overweave.schedules.records.experts import PUSH
from tests.ranks import run_ranks

T, K, N, EXPERTS, TOP = 5, 8, 8, 6, 3


def layers_are_right(x: torch.Tensor, ids: torch.Tensor, own: slice) -> bool:
    """Both halves, a whole layer, and sums of tokens that every rank has, beside plain torch."""
    same, ranks = torch.Generator().manual_seed(0), dist.get_world_size()
    w = torch.randint(-2, 3, (EXPERTS, N, K), generator=same).float()
    down = torch.randint(-2, 3, (EXPERTS, K, N), generator=same).float()
    h, routed = moe.all_gather_experts(x[own], ids[own], w, plan=PUSH)
    y = moe.experts_reduce_scatter(h, routed, None, down, plan=PUSH)
    z = moe.experts_mlp(x[own], ids[own], None, moe.ExpertWeights(w, down), plan=PUSH)
    every = moe.experts_all_reduce(h, routed, None, down, plan=PUSH)
    products = torch.einsum("tsn,tskn->tsk", torch.einsum("tk,tsnk->tsn", x, w[ids.clamp(0)]), down[ids.clamp(0)])
    wanted = ranks * torch.where(ids[..., None] >= 0, products, 0.0).sum(1)
    return torch.equal(y, wanted[own]) and torch.equal(z, wanted[own]) and torch.equal(every, wanted)


def tokens_are_right(x: torch.Tensor, ids: torch.Tensor, own: slice) -> bool:
    """Tokens that travel to experts of other ranks, and back."""
    sent = moe.dispatch(x[own], ids[own], None, EXPERTS, most=len(x), plan=PUSH)
    y = moe.combine(sent.x * (sent.topk_ids >= 0).sum(1, keepdim=True), sent)
    return torch.equal(y, x[own] * (ids[own] >= 0).sum(1, keepdim=True))


# What is compared, and how many programs serve it.
CHECKS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor, slice], bool], int]] = {
    "layers": (layers_are_right, 4),
    "pushed tokens": (tokens_are_right, 2),
}


def wrong_routings(what: str, count: int) -> list[int]:
    """How many of so many routings gave another result than plain torch, and how many programs served them. A random
    rank is late."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    same, late = torch.Generator().manual_seed(0), random.Random(0)
    wrong, own = 0, slice(rank * T, (rank + 1) * T)
    for index in range(count):
        x = torch.randint(-2, 3, (T * ranks, K), generator=same).float()
        ids = torch.randint(-1, EXPERTS if index % 3 else 1, (T * ranks, TOP), generator=same, dtype=torch.int32)
        if late.randrange(2 * ranks) == rank:
            time.sleep(0.002)
        wrong += not CHECKS[what][0](x, ids, own)
    group = dist.group.WORLD
    assert group is not None
    return [wrong, len(_BUILT[group])]


@pytest.mark.slow
@pytest.mark.parametrize("what", CHECKS)
def test_some_routings(what: str):
    assert run_ranks(wrong_routings, 2, what, 40) == [[0, CHECKS[what][1]]] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("what", CHECKS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_thousand_routings(ranks: int, what: str):
    assert run_ranks(wrong_routings, ranks, what, 1000, timeout_s=900) == [[0, CHECKS[what][1]]] * ranks


CHANNELS = {"halves": ("slots", "last"), "layer": ("slots", "last")}


def hasty(what: str, channel: str) -> list[str]:
    """What a first call says whose program does not wait for a channel."""
    draw, rank = torch.Generator().manual_seed(0), dist.get_rank()
    x = torch.ones(T * dist.get_world_size(), K)[rank * T : (rank + 1) * T]
    ids = torch.randint(0, EXPERTS, (T, TOP), generator=draw, dtype=torch.int32)
    w, down = torch.ones(EXPERTS, N, K), torch.ones(EXPERTS, K, N)
    honest = TileQueue.rank_wait

    def hastily(queue: TileQueue, name: str, tile: int) -> None:
        if name != channel:
            honest(queue, name, tile)

    with patch.object(TileQueue, "rank_wait", hastily):
        try:
            if what == "layer":
                moe.experts_mlp(x, ids, None, moe.ExpertWeights(w, down), plan=PUSH)
            else:
                h, routed = moe.all_gather_experts(x, ids, w, plan=PUSH)
                moe.experts_reduce_scatter(h, routed, None, down, plan=PUSH)
        except OverweaveError as error:
            return [type(error).__name__]
    return []


@pytest.mark.parametrize(("what", "channel"), [(what, each) for what, some in CHANNELS.items() for each in some])
def test_a_program_that_does_not_wait_is_refused_before_it_runs(what: str, channel: str):
    assert run_ranks(hasty, 2, what, channel) == [["ScheduleRefused"]] * 2
