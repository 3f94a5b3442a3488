"""Layers of experts under torch.compile(fullgraph=True): the same results and gradients as eager calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from overweave import moe
from tests.ranks import run_ranks

T, K, INNER, EXPERTS, TOP = 6, 16, 24, 4, 2
Layer = Callable[..., torch.Tensor]


def tensor_parallel(x, weights, up, down, ids):
    h, routed = moe.all_gather_experts(x, ids, up, glu=moe.Glu())
    return moe.experts_reduce_scatter(h, routed, weights, down)


def all_reduced(x, weights, up, down, ids):
    h, routed = moe.experts_matmul(x, ids, up, glu=moe.GPT_OSS)
    return moe.experts_all_reduce(h, routed, weights, down)


def expert_parallel(x, weights, up, down, ids):
    sent = moe.dispatch(x, ids, weights, EXPERTS * dist.get_world_size(), most=4 * T)
    h, routed = moe.experts_matmul(sent.x, sent.topk_ids, up, glu=moe.Glu())
    return moe.combine(moe.experts_sum(h, routed, sent.topk_weights, down), sent)


def chained(x, weights, up, down, ids):
    layer = moe.ExpertWeights(up, down, glu=moe.GPT_OSS)
    return moe.experts_mlp(x, ids, weights, layer, plan="push")


LAYERS: dict[str, Layer] = {each.__name__: each for each in (tensor_parallel, all_reduced, expert_parallel)}


def outcome(layer: Layer, name: str) -> list[torch.Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    same = torch.Generator().manual_seed(rank if name != "all_reduced" else 7)
    experts = EXPERTS * (ranks if name == "expert_parallel" else 1)
    drawn = [torch.randn(T, K, generator=same), torch.rand(T, TOP, generator=same)]
    drawn += [torch.randn(EXPERTS, 2 * INNER, K, generator=same), torch.randn(EXPERTS, K, INNER, generator=same)]
    leaves = [each.requires_grad_() for each in drawn]
    ids = torch.randint(0, experts, (T, TOP), generator=same, dtype=torch.int32)
    y = layer(*leaves, ids)
    y.square().sum().backward()
    return [y.detach(), *(each.grad for each in leaves)]  # type: ignore[list-item]


def chain_differs() -> float:
    """How far a compiled chain, which nobody differentiates, is off the same halves."""
    torch._dynamo.reset()
    rank = torch.Generator().manual_seed(dist.get_rank())
    shapes = ((T, K), (T, TOP), (EXPERTS, 2 * INNER, K), (EXPERTS, K, INNER))
    given = [torch.randn(*shape, generator=rank) for shape in shapes]
    ids = torch.randint(0, EXPERTS, (T, TOP), generator=rank)
    with torch.no_grad():
        found = torch.compile(chained, fullgraph=True, backend="aot_eager")(*given, ids)
        x, weights, up, down = given
        h, routed = moe.all_gather_experts(x, ids, up, glu=moe.GPT_OSS)
        wanted = moe.experts_reduce_scatter(h, routed, weights, down)
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.nightly
def test_a_compiled_chain_is_its_halves():
    assert max(run_ranks(chain_differs, 2, timeout_s=240)) < 1e-5


def differs(name: str) -> list[float]:
    torch._dynamo.reset()
    layer = LAYERS[name]
    wanted = outcome(layer, name)
    found = outcome(torch.compile(layer, fullgraph=True, backend="aot_eager"), name)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)]


NIGHTLY = ("tensor_parallel", "all_reduced")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.nightly] * (each in NIGHTLY)) for each in LAYERS]
)
def test_a_compiled_layer_is_the_eager_one(name: str):
    for told in run_ranks(differs, 2, name, timeout_s=240):
        assert max(told) < 1e-5
