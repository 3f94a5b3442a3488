"""One program serves every routing: tokens that move between experts from call to call, and a rank that is late."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

from overweave import moe
from overweave.moe.overlapped import _PROGRAMS
from tests.ranks import run_ranks

T, K, N, EXPERTS, TOP = 5, 8, 8, 6, 3


def wrong_routings(count: int) -> list[int]:
    """How many of so many routings gave another result than plain torch, and how many programs served them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    same, late = torch.Generator().manual_seed(0), random.Random(0)
    w = torch.randint(-2, 3, (EXPERTS, N, K), generator=same).float()
    down = torch.randint(-2, 3, (EXPERTS, K, N), generator=same).float()
    wrong = 0
    for index in range(count):
        x = torch.randint(-2, 3, (T * ranks, K), generator=same).float()
        ids = torch.randint(-1, EXPERTS if index % 3 else 1, (T * ranks, TOP), generator=same, dtype=torch.int32)
        if late.randrange(2 * ranks) == rank:
            time.sleep(0.002)
        own = slice(rank * T, (rank + 1) * T)
        h, routed = moe.all_gather_experts(x[own], ids[own], w, plan="push")
        y = moe.experts_reduce_scatter(h, routed, None, down, plan="push")
        products = torch.einsum("tsn,tskn->tsk", torch.einsum("tk,tsnk->tsn", x, w[ids.clamp(0)]), down[ids.clamp(0)])
        wanted = ranks * torch.where(ids[..., None] >= 0, products, 0.0).sum(1)[own]
        wrong += not torch.equal(y, wanted)
    group = dist.group.WORLD
    assert group is not None
    return [wrong, len(_PROGRAMS[group])]


@pytest.mark.slow
def test_some_routings():
    assert run_ranks(wrong_routings, 2, 40) == [[0, 2]] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_thousand_routings(ranks: int):
    assert run_ranks(wrong_routings, ranks, 1000, timeout_s=900) == [[0, 2]] * ranks
