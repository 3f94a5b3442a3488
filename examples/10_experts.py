"""A layer of experts on four ranks, in three ways: weights split, experts spread over ranks, and plain torch.

    python examples/10_experts.py

Tensor parallel, each rank has a part of every expert; expert parallel, each has two experts whole. No rank's host looks
at what the router chooses, but to send tokens to other ranks. Gradients are checked, the router's too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from overweave import moe
from overweave.runtime.host.processes import run_ranks

RANKS, TOKENS, HIDDEN, INNER, EXPERTS, TOP = 4, 24, 16, 32, 8, 2


def plain(x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The layer of all tokens in plain torch, expert by expert."""
    weights, ids = (x @ router).softmax(1).topk(TOP)
    y = torch.zeros_like(x)
    for expert in range(EXPERTS):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        gate, other = (x[tokens] @ up[expert].t()).chunk(2, 1)
        h = torch.nn.functional.silu(gate) * other
        y = y.index_add(0, tokens, (h @ down[expert].t()) * weights[tokens, slots, None])
    return y


def tensor_parallel(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor):
    """This rank's part of every expert: halves of each weight are cut alike."""
    rank = dist.get_rank()
    own_up = up.view(EXPERTS, 2, RANKS, INNER // RANKS, HIDDEN)[:, :, rank].flatten(1, 2)
    own_down = down.view(EXPERTS, HIDDEN, RANKS, INNER // RANKS)[:, :, rank]
    return moe.experts_mlp(x, ids, weights, moe.ExpertWeights(own_up, own_down, glu=moe.Glu()), plan="push")


def expert_parallel(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor):
    """This rank's experts, whole: tokens travel there and back."""
    own = slice(dist.get_rank() * EXPERTS // RANKS, (dist.get_rank() + 1) * EXPERTS // RANKS)
    sent = moe.dispatch(x, ids, weights, EXPERTS)
    h, routed = moe.experts_matmul(sent.x, sent.topk_ids, up[own], glu=moe.Glu())
    return moe.combine(moe.experts_sum(h, routed, sent.topk_weights, down[own]), sent)


def step() -> list[float]:
    """How far this rank's tokens, and the gradient of the router, are off plain torch, in both ways."""
    same, rank, off = torch.Generator().manual_seed(0), dist.get_rank(), []
    shapes = ((TOKENS, HIDDEN), (HIDDEN, EXPERTS), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    x, router, up, down = (torch.randn(*shape, generator=same) / shape[-1] ** 0.5 for shape in shapes)
    wanted_router = router.clone().requires_grad_()
    wanted = plain(x, wanted_router, up, down)
    wanted.square().sum().backward()
    for layer in (tensor_parallel, expert_parallel):
        own, mine = x.chunk(RANKS)[rank], router.clone().requires_grad_()
        weights, ids = (own @ mine).softmax(1).topk(TOP)
        y = layer(own, ids, weights, up, down)
        y.square().sum().backward()
        dist.all_reduce(mine.grad)  # of the tokens of all ranks
        off.append(float((y - wanted.chunk(RANKS)[rank]).detach().abs().max()))
        off.append(float((mine.grad - wanted_router.grad).abs().max()))
    return off


def main() -> None:
    told = [max(each) for each in zip(*run_ranks(step, RANKS), strict=True)]
    for name, (y, router) in {"tensor parallel": told[:2], "expert parallel": told[2:]}.items():
        print(f"{name}: off plain torch by {y:.0e}, the router's gradient by {router:.0e}, on {RANKS} ranks")


if __name__ == "__main__":
    main()
