"""Kernels of layers of experts, interpreted on CPU ranks: the exactness campaign, cut short; and that it would notice.

Run by test_interpreted_experts.py in a process of its own, in which Triton interprets (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from unittest.mock import patch

import pytest

from overweave.runtime.interpreted import interpreter

interpreter.repair()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from campaigns.exact import interpreted_moe, moe_exactness  # noqa: E402
from overweave import moe  # noqa: E402
from overweave.errors import PeerTimeout  # noqa: E402
from overweave.moe import sending  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.runtime.handwritten import TileLaunch  # noqa: E402
from overweave.runtime.host.processes import run_ranks  # noqa: E402
from overweave.runtime.kernel_calls import rows  # noqa: E402
from overweave.runtime.sent_rows import Sending, SendSizes  # noqa: E402

PUSH = "expert parallel, push"


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (3, 2)])
def test_random_layers(ranks: int, count: int):
    assert run_ranks(moe_exactness.tried, ranks, PUSH, count, ranks, timeout_s=200) == [[]] * ranks


@pytest.mark.parametrize("part", ["layer, push", "all-reduce, push"])
def test_whole_layers_by_their_kernels(part: str):
    """Routing, matmuls whose tiles stand as shards come, and sums over slots."""
    assert run_ranks(moe_exactness.tried, 2, part, 1, 11, timeout_s=200) == [[]] * 2


def tried_without_sums() -> list[str]:
    """With a kernel that leaves its results as they are."""
    with patch.object(interpreted_moe, "add", lambda sums: torch.zeros(1)):
        return moe_exactness.tried("layer, push", 1, 11)


def test_a_kernel_that_computes_nothing_is_noticed():
    assert any(run_ranks(tried_without_sums, 2, timeout_s=100))


def outcomes() -> list[bool | int]:
    """Chosen rows and stretches, more than one step of a kernel; void and right."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(rank)
    x, ids = torch.randn(20, 24, generator=draw), torch.randint(-1, 5, (20, 3), generator=draw)
    with patch.object(rows, "STEP_WORDS", 16):
        pairs = [moe.dispatch(x, ids, None, 5, most=20 * ranks, plan=plan) for plan in (None, moe.Push(sms=3))]
        sums = [moe.combine(sent.x * (1 + rank), sent) for sent in pairs]
        void = moe.dispatch(x, ids, None, 5, most=7, plan="push")
        of_void = moe.combine(void.x, void)
    assert void.reason is not None
    is_right = torch.equal(pairs[0].x, pairs[1].x) and torch.equal(*sums)
    return [is_right, int(void.reason), bool(void.x.isnan().all() and of_void.isnan().all())]


@pytest.mark.parametrize("ranks", [1, 3])
def test_kernels_are_what_torch_does(ranks: int):
    assert run_ranks(outcomes, ranks, timeout_s=100) == [[True, 4, True]] * ranks


def tried_spoiled(what: str) -> list[str]:
    """With a kernel that sends fewer programs' parts, or reads a wrong place."""

    def spoiled(sizes: SendSizes, sent: Sending, *more: object) -> TileLaunch:
        if what == "push":
            launch = rows.push_launch(sizes, sent)
            return TileLaunch(launch.kernel, (launch.grid[0] - 1,), launch.arguments, launch.options)
        return rows.add_launch(sizes._replace(shard=sizes.shard + 1), sent, *more)  # type: ignore[arg-type]

    with patch.object(sending, "load", lambda name: spoiled if name == f"rows {what}" else load(name)):
        return moe_exactness.tried(PUSH, 1, 5)


def test_a_program_that_is_missing_is_noticed():
    with pytest.raises(Exception, match=PeerTimeout.__name__):
        run_ranks(tried_spoiled, 2, "push", timeout_s=100, group_timeout_s=1.5)


def test_a_wrong_place_is_noticed():
    assert any(run_ranks(tried_spoiled, 2, "add", timeout_s=100))
