"""Gradients of gradients of experts: refused by name, as no part of them may be missing without a word."""

from __future__ import annotations

import torch
import torch.distributed as dist

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
