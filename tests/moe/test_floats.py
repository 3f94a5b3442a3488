"""Layers of experts in floats, by every plan: as near to fp64 as torch, the same bits again, and token by token."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from overweave import moe
from overweave.compat.torch_names import reduce_scatter_single
from overweave.schedules.records.experts import PLANS
from tests.ranks import run_ranks

T, K, INNER, EXPERTS, TOP = 6, 32, 16, 4, 8  # tokens of a rank; INNER of a rank, too
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, moe.ExpertWeights], torch.Tensor]


def of_halves(
    plan: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: moe.ExpertWeights
) -> torch.Tensor:
    h, routed = moe.all_gather_experts(x, ids, layer.up, plan=plan)
    return moe.experts_reduce_scatter(h, routed, weights, layer.down, plan=plan)


def of_whole_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: moe.ExpertWeights
) -> torch.Tensor:
    sent = moe.dispatch(x, ids, weights, EXPERTS)
    h, routed = moe.experts_matmul(sent.x, sent.topk_ids, layer.up)
    return moe.combine(moe.experts_sum(h, routed, sent.topk_weights, layer.down), sent)


def of_a_layer(
    plan: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: moe.ExpertWeights
) -> torch.Tensor:
    return moe.experts_mlp(x, ids, weights, layer, plan=plan)


# Name -> the layer, and whether ranks hold experts whole.
LAYERS: dict[str, tuple[Layer, bool]] = {
    **{f"halves, {plan}": (partial(of_halves, plan), False) for plan in PLANS},
    **{f"layer, {plan}": (partial(of_a_layer, plan), False) for plan in PLANS},
    **{f"whole experts, {plan}": (partial(of_a_layer, plan), True) for plan in PLANS},
    "dispatch": (of_whole_experts, True),
}


class Drawn:
    """A layer of all ranks, drawn alike on each, and this rank's part of it."""

    def __init__(self, is_whole: bool, dtype: torch.dtype) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        draw = torch.Generator().manual_seed(1)
        inner = INNER * ranks
        shapes = ((T * ranks, K), (EXPERTS, inner, K), (EXPERTS, K, inner))
        self.x, self.up, self.down = (torch.randn(*shape, generator=draw).to(dtype) for shape in shapes)
        self.ids = torch.randint(0, EXPERTS, (T * ranks, TOP), generator=draw, dtype=torch.int32)
        self.weights = torch.rand(T * ranks, TOP, generator=draw)
        self.own = slice(rank * T, (rank + 1) * T)
        held = EXPERTS // ranks
        self.experts = slice(rank * held, (rank + 1) * held) if is_whole else slice(None)
        self.inner = slice(None) if is_whole else slice(rank * INNER, (rank + 1) * INNER)
        first = self.experts.start if is_whole else None
        up, down = self.up[self.experts, self.inner], self.down[self.experts][:, :, self.inner]
        self.layer = moe.ExpertWeights(up.contiguous(), down.contiguous(), first=first)

    def given(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, moe.ExpertWeights]:
        return self.x[self.own], self.ids[self.own], self.weights[self.own], self.layer

    def plain(self, dtype: torch.dtype, part: slice, held: slice) -> torch.Tensor:
        """All tokens in plain torch, of a part of every expert, and of some experts."""
        products = []
        for slot in range(TOP):
            ids = self.ids[:, slot]
            is_held = (ids >= (held.start or 0)) & (ids < (held.stop or EXPERTS))
            h = torch.einsum("tk,tik->ti", self.x.to(dtype), self.up.to(dtype)[ids, part])
            product = torch.einsum("ti,tki->tk", h, self.down.to(dtype)[ids][:, :, part])
            products.append(torch.where(is_held.unsqueeze(1), product, 0.0))
        return (torch.stack(products, 1) * self.weights[:, :, None].to(dtype)).sum(1)


def errors(name: str) -> list[float]:
    """Of this rank's tokens of a layer in bf16, against fp64: the sums of squares, ours and those of plain torch."""
    layer, is_whole = LAYERS[name]
    drawn = Drawn(is_whole, torch.bfloat16)
    y = layer(*drawn.given())
    plain = torch.empty_like(y)
    reduce_scatter_single(plain, drawn.plain(torch.bfloat16, drawn.inner, drawn.experts))
    exact = drawn.plain(torch.float64, slice(None), slice(None))[drawn.own]
    return [float((each.double() - exact).square().sum()) for each in (y, plain)]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_floats_are_no_further_off_than_torchs(name: str, ranks: int):
    ours, plain = map(sum, zip(*run_ranks(errors, ranks, name), strict=True))
    assert ours <= 1.05**2 * plain


def bits(name: str, dtype: torch.dtype, calls: int) -> list[bool]:
    """Whether a call has the same bits again, whichever rank comes late; and whether the first token has them beside
    infinite rows and NaN weights of the others, which are themselves no numbers then."""
    layer, is_whole = LAYERS[name]
    drawn, late = Drawn(is_whole, dtype), random.Random(0)
    x, ids, weights, own = drawn.given()
    first = layer(x, ids, weights, own)
    found = []
    for _ in range(calls):
        if late.randrange(dist.get_world_size()) == dist.get_rank():
            time.sleep(0.01)
        found.append(torch.equal(first, layer(x, ids, weights, own)))
    spoiled, nan = x.clone(), weights.clone()
    spoiled[1], nan[2] = float("inf"), float("nan")
    beside = layer(spoiled, ids, nan, own)
    return [
        *found,
        torch.equal(first[0], beside[0]),
        bool(beside[2].isnan().all()),
        not bool(beside[1].isfinite().all()),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_the_same_again_and_whatever_other_tokens_are(name: str, dtype: torch.dtype):
    for found in run_ranks(bits, 2, name, dtype, 4):
        assert all(found)
