"""Gradients of experts where ranks, tokens and rows have none; those of gradients are refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.utils.checkpoint import checkpoint

from overweave import moe
from overweave.errors import InputError
from tests.ranks import run_ranks

TOKENS, HIDDEN, INNER, EXPERTS, TOP = 4, 16, 16, 4, 2


def refusal(y: torch.Tensor, *leaves: torch.Tensor) -> str:
    try:
        found = torch.autograd.grad(y.tanh().sum(), leaves, create_graph=True)
    except InputError as error:
        return str(error)
    return f"{len(found)} gradients"


def refused_calls() -> list[str]:
    """For `run_ranks`: what each call says."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(TOKENS, HIDDEN, generator=draw).requires_grad_()
    topk_weights, topk_ids = torch.randn(TOKENS, EXPERTS, generator=draw).softmax(1).topk(TOP)
    up, down = (torch.randn(EXPERTS, *each, generator=draw) for each in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    weights = moe.ExpertWeights(up.requires_grad_(), down.requires_grad_(), glu=moe.Glu())
    found = [
        refusal(moe.experts_mlp(x, topk_ids, topk_weights, weights, plan=plan), x, up, down)
        for plan in ("sequential", "push")
    ]
    sent = moe.dispatch(x, topk_ids, topk_weights, EXPERTS)
    return [*found, refusal(moe.combine(sent.x * 2.0, sent), x)]


def test_layers_of_experts_are_differentiated_once():
    for found in run_ranks(refused_calls, 2):
        assert len(found) == 3
        assert all("twice" in each and "create_graph=True" in each for each in found), found


def test_a_grouped_matmul_is_differentiated_once():
    x, w = torch.ones(6, 16, requires_grad=True), torch.ones(2, 8, 16, requires_grad=True)
    y = moe.grouped_matmul(x, w.transpose(1, 2), torch.tensor([2, 6], dtype=torch.int32))
    assert "overweave.grouped_matmul twice" in refusal(y, x, w)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("lost", [-1, 9])
def test_a_row_that_is_stored_nowhere_has_no_gradient(lost: int, activation: str | None):
    draw = torch.Generator().manual_seed(0)
    x, w, row_weights = (torch.rand(*each, generator=draw).requires_grad_() for each in ((4, 3), (2, 3, 5), (4,)))
    into, dy = torch.tensor([3, lost, 0, 1], dtype=torch.int32), torch.rand(4, 5, generator=draw)
    offs = torch.tensor([2, 4], dtype=torch.int32)
    y = moe.grouped_matmul(x, w, offs, into=into, row_weights=row_weights, activation=activation)
    z = torch.cat([x[:2] @ w[0], x[2:] @ w[1]])
    z = (functional.silu(z) if activation else z) * row_weights[:, None]
    wanted = torch.zeros(4, 5).index_put((torch.tensor([3, 0, 1]),), z[[0, 2, 3]])
    found = torch.autograd.grad(y, (x, w, row_weights), dy)
    for one, other in zip((y, *found), (wanted, *torch.autograd.grad(wanted, (x, w, row_weights), dy)), strict=True):
        torch.testing.assert_close(one, other)


def checkpointed() -> list[float]:
    """For `run_ranks`: how far gradients behind a checkpoint are off, by both plans of what sums over ranks."""
    draw, off = torch.Generator().manual_seed(dist.get_rank()), []
    x = torch.randn(TOKENS, HIDDEN, generator=draw).requires_grad_()
    topk_weights, ids = torch.randn(TOKENS, EXPERTS, generator=draw).softmax(1).topk(TOP)
    up, down = (torch.randn(EXPERTS, *each, generator=draw) for each in ((INNER, HIDDEN), (HIDDEN, INNER)))
    weights = moe.ExpertWeights(up.requires_grad_(), down.requires_grad_())

    def layer(x: torch.Tensor) -> torch.Tensor:
        return moe.experts_mlp(x, ids, topk_weights, weights, plan="push")

    def total(x: torch.Tensor) -> torch.Tensor:
        h, routed = moe.experts_matmul(x, ids, up)
        return moe.experts_all_reduce(h, routed, None, down, plan="push")

    for function in (layer, total):
        wanted = torch.autograd.grad(function(x).tanh().sum(), (x, up, down))
        found = torch.autograd.grad(checkpoint(function, x, use_reentrant=False).tanh().sum(), (x, up, down))
        off += [float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True)]
    return off


def test_a_checkpoint_may_hold_them():
    assert run_ranks(checkpointed, 2) == [[0.0] * 6] * 2


def from_few_tokens() -> bool:
    """For `run_ranks`: whether gradients reach the only token, whose rank sums expanded ones; others have none."""
    rank = dist.get_rank()
    x = torch.ones(int(rank == 0), 8, requires_grad=True)
    w = torch.ones(2, 8, 8, requires_grad=True)
    ids = torch.zeros(1, 1, dtype=torch.int32).t()[: x.shape[0]]
    moe.experts_mlp(x, ids, None, moe.ExpertWeights(w, w), m=1, plan="push").sum().backward()
    assert x.grad is not None
    sent = moe.dispatch(x, ids, None, 2, most=2, plan=moe.Push(tokens=1))
    moe.combine(sent.x, sent).sum().backward()
    return bool((x.grad == 1 + 8 * 8 * 2).all())


def test_ranks_may_have_no_tokens():
    assert run_ranks(from_few_tokens, 2) == [True, True]


def without_experts() -> bool:
    """For `run_ranks`: whether weights of whole experts have gradients where the last rank has no expert."""
    rank = dist.get_rank()
    w = torch.ones(int(rank == 0), 8, 8, requires_grad=True)
    ids = torch.zeros(4, 1, dtype=torch.int32)
    moe.experts_mlp(torch.ones(4, 8), ids, None, moe.ExpertWeights(w, w, first=rank)).sum().backward()
    return w.grad is not None


def test_a_rank_without_experts_takes_part_where_weights_alone_have_gradients():
    assert run_ranks(without_experts, 2) == [True, True]


def test_tangents_are_refused():
    x, w, offs = torch.ones(4, 16), torch.ones(2, 16, 8), torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(InputError, match="it has a tangent"):
        torch.func.jvp(lambda x: moe.grouped_matmul(x, w, offs), (x,), (x,))


def widths() -> list[int]:
    """For `run_ranks`: the columns of h, of an interleaved glu whose weights are stored as `[experts, k, n]`."""
    x, ids, w = torch.randn(2, 8), torch.tensor([[0], [1]]), torch.randn(2, 8, 32).transpose(1, 2)
    return [
        moe.all_gather_experts(x, ids, w, glu=moe.GPT_OSS, plan=plan)[0].shape[1] for plan in ("push", "sequential")
    ]


def test_interleaved_weights_are_gated_however_they_are_stored():
    assert run_ranks(widths, 2) == [[16, 16]] * 2


def test_autocast_casts_no_bias_of_a_glu():
    x, ids = torch.ones(2, 8, dtype=torch.float16), torch.tensor([[0], [1]])
    w, bias = torch.ones(2, 32, 8, dtype=torch.float16), torch.ones(2, 32, dtype=torch.float16)
    wanted = moe.experts_matmul(x, ids, w, bias=bias, glu=moe.Glu())[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(moe.experts_matmul(x, ids, w, bias=bias, glu=moe.Glu())[0], wanted)
