"""Experts split over ranks: what one token gives whatever the others are, bad input, ranks that differ."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overweave import moe
from overweave.compat.torch_names import reduce_scatter_single
from overweave.errors import InputError, OverweaveError
from tests.ranks import run_ranks

T, K, N, EXPERTS = 3, 8, 6, 4
X, W = torch.ones(T, K), torch.ones(EXPERTS, N, K)
IDS, WEIGHTS = torch.arange(2 * T, dtype=torch.int32).view(T, 2) % EXPERTS, torch.ones(T, 2)
H, W8 = torch.ones(2 * T * 2, K), torch.ones(EXPERTS, 8, K)


def first(**changed: Any) -> Any:
    given = {"x_shard": X, "topk_ids": IDS, "w": W} | changed
    return moe.all_gather_experts(**given)


def second(**changed: Any) -> Any:
    given = {"h": H, "topk_ids": IDS, "topk_weights": WEIGHTS, "w": W} | changed
    return moe.experts_reduce_scatter(**given)


def both(**changed: Any) -> Any:
    given = {"h": H[: 2 * T], "topk_ids": IDS, "topk_weights": WEIGHTS, "w": W} | changed
    return moe.experts_all_reduce(**given)


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no matrix": (first, {"x_shard": X[0]}, r"got \[8\]"),
    "an expert too many": (first, {"topk_ids": IDS + 1}, "4"),
    "ids of another rank": (first, {"topk_ids": IDS[:1]}, r"got \[1, 2\]"),
    "one weight": (first, {"w": W[0]}, r"w \[experts, n, 8\]"),
    "weights of another width": (first, {"w": W.transpose(1, 2)}, r"got \[4, 8, 6\]"),
    "weights of another dtype": (first, {"w": W.double()}, "float64"),
    "biases of other experts": (first, {"bias": torch.ones(1, N)}, r"bias \[4, 6\]"),
    "tokens dealt otherwise": (first, {"m": 5}, "passes 3 tokens of m=5"),
    "tokens that are no int": (first, {"m": 6.0}, "m=6.0"),
    "rows of other tokens": (second, {"h": H[:-1]}, "h has 11 rows"),
    "weights of other slots": (second, {"topk_weights": WEIGHTS[:, :1]}, r"topk_weights \[3, 2\]"),
    "h of all tokens": (both, {"h": H}, "h has 12 rows"),
    "an expert too many, overlapped": (first, {"topk_ids": IDS + 1, "w": W8, "plan": "push"}, "1 to 4"),
    "no such plan": (first, {"plan": "ring"}, "Use one of sequential, push"),
    "rows that are no words": (first, {"plan": "push"}, "no whole words of 16 bytes"),
    "experts that nobody has": (both, {"topk_ids": IDS - 5}, "-"),
}


def refused() -> list[str]:
    told = []
    for call, changed, _ in BAD.values():
        with pytest.raises(InputError) as caught:
            call(**changed)
        told.append(str(caught.value))
    return told


def test_bad_input_is_refused_on_every_rank():
    for told in run_ranks(refused, 2):
        for text, (_, _, pattern) in zip(told, BAD.values(), strict=True):
            assert re.search(pattern, text), (text, pattern)


def differing(what: str) -> str:
    rank = dist.get_rank()
    changed: dict[str, Any] = {
        "experts": {"w": W[: EXPERTS - rank]},
        "slots": {"topk_ids": IDS[:, : 2 - rank]},
        "tokens": {"x_shard": X[: T - rank], "topk_ids": IDS[: T - rank]},
        "gradients": {"x_shard": X.clone().requires_grad_(rank == 0)},
        "bad input of one": {"topk_ids": IDS[: T - rank]},
    }[what]
    try:
        first(**changed)
    except OverweaveError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("what", ["experts", "slots", "tokens", "gradients", "bad input of one"])
def test_ranks_that_differ_are_an_error_on_every_rank(what: str):
    told = run_ranks(differing, 2, what)
    assert told == ["RankMismatch", "InputError" if what == "bad input of one" else "RankMismatch"]


def of_one_token(dtype: torch.dtype) -> bool:
    """Whether a token's row has the same bits beside NaN weights and infinite rows of others, and twice over."""
    draw = torch.Generator().manual_seed(0)
    w, down = torch.randn(EXPERTS, N, K, generator=draw), torch.randn(EXPERTS, K, N, generator=draw)
    x, weights = torch.randn(T, K, generator=draw), torch.rand(T, 2, generator=draw)

    def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        h, routed = moe.all_gather_experts(x.to(dtype), IDS, w.to(dtype))
        return moe.experts_reduce_scatter(h, routed, weights, down.to(dtype))

    alone, again = layer(x, weights), layer(x, weights)
    spoiled, nan = x.clone(), weights.clone()
    spoiled[1], nan[2] = float("inf"), float("nan")
    beside = layer(spoiled, nan)
    return torch.equal(alone, again) and torch.equal(alone[0], beside[0]) and bool(beside[2].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_what_it_is_whatever_the_others_are(dtype: torch.dtype):
    assert run_ranks(of_one_token, 2, dtype) == [True, True]


def errors() -> list[float]:
    """Of this rank's rows of a layer in bf16, against fp64: the sums of squares, ours and those of plain torch."""
    draw, size, rank = torch.Generator().manual_seed(1), dist.get_world_size(), dist.get_rank()
    t, k, inner, experts, top = 48, 32, 16 * size, 4, 2
    whole = [torch.randn(*shape, generator=draw) for shape in ((t, k), (experts, inner, k), (experts, k, inner))]
    ids = torch.randint(0, experts, (t, top), generator=draw, dtype=torch.int32)
    weights, (x, up, down) = torch.rand(t, top, generator=draw), (each.bfloat16() for each in whole)
    part, own = (slice(rank * each // size, (rank + 1) * each // size) for each in (inner, t))

    def summed(dtype: torch.dtype, part: slice) -> torch.Tensor:
        products = []
        for slot in range(top):
            h = torch.einsum("tk,tik->ti", x.to(dtype), up.to(dtype)[ids[:, slot], part])
            products.append(torch.einsum("ti,tki->tk", h, down.to(dtype)[ids[:, slot]][:, :, part]))
        return (torch.stack(products, 1) * weights[:, :, None].to(dtype)).sum(1)

    h, routed = moe.all_gather_experts(x[own], ids[own], up[:, part].contiguous())
    y = moe.experts_reduce_scatter(h, routed, weights[own], down[:, :, part].contiguous())
    plain = torch.empty_like(y)
    reduce_scatter_single(plain, summed(torch.bfloat16, part))
    exact = summed(torch.float64, slice(None))[own]
    return [float((each.double() - exact).square().sum()) for each in (y, plain)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_floats_are_no_further_off_than_torchs(world_size: int):
    ours, plain = map(sum, zip(*run_ranks(errors, world_size), strict=True))
    assert ours <= 1.05**2 * plain
