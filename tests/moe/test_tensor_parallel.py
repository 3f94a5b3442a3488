"""Experts split over ranks: bad input, and ranks that differ."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overweave import moe
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


DOWN = torch.ones(EXPERTS, K, 8)


def layer(**changed: Any) -> Any:
    given = {"x_shard": X, "topk_ids": IDS, "topk_weights": WEIGHTS, "weights": moe.ExpertWeights(W8, DOWN)} | changed
    return moe.experts_mlp(**given)


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no matrix": (first, {"x_shard": X[0]}, r"got \[8\]"),
    "an expert too many": (first, {"topk_ids": IDS + 1}, "4"),
    "an expert of more than 32 bits": (first, {"topk_ids": IDS.long() + 2**32}, "2147483647"),
    "an expert of more than 32 bits, overlapped": (
        first,
        {"topk_ids": IDS.long() + 2**32, "w": W8, "plan": "push"},
        "2147483647",
    ),
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
    "a layer of batches": (layer, {"x_shard": X[None]}, r"got \[1, 3, 8\]"),
    "a layer's expert too many": (layer, {"topk_ids": IDS + 1}, "4"),
    "a layer's expert too many, overlapped": (layer, {"topk_ids": IDS + 1, "plan": "push"}, "1 to 4"),
    "a layer's weights of other slots": (layer, {"topk_weights": WEIGHTS[:, :1]}, r"topk_weights \[3, 2\]"),
    "a layer's tokens dealt otherwise": (layer, {"m": 5}, "passes 3 tokens of m=5"),
    "a layer's odd glu": (layer, {"weights": moe.ExpertWeights(W8[:, :7], DOWN, glu=moe.Glu())}, "7 rows"),
    "a layer of a plain tuple": (layer, {"weights": (W8, DOWN)}, "got tuple"),
    "a first expert before all": (layer, {"weights": moe.ExpertWeights(W8, DOWN, first=-1)}, "first=-1"),
    "a first expert beyond all": (layer, {"weights": moe.ExpertWeights(W8, DOWN, first=9)}, "from expert 9 on"),
    "the same experts on every rank": (
        layer,
        {"weights": moe.ExpertWeights(W8, DOWN, first=0), "plan": "push"},
        "rank 1 holds 4 from expert 0 on, ranks before it hold 4",
    ),
    "a negative limit": (layer, {"weights": moe.ExpertWeights(W8, DOWN, glu=moe.Glu(limit=-1.0))}, "limit '-1.0'"),
    "a layer of fp64, overlapped": (
        layer,
        {"x_shard": X.double(), "weights": moe.ExpertWeights(W8.double(), DOWN.double()), "plan": "push"},
        "got torch.float64",
    ),
    "biases that are ints": (
        layer,
        {"weights": moe.ExpertWeights(W8, DOWN, torch.ones(EXPERTS, 8, dtype=torch.int32)), "plan": "push"},
        r"bias \[4, 8\]: got torch.int32",
    ),
    "a plan that is no word": (layer, {"plan": 3}, "Use one of sequential, push"),
    "second weights of other experts": (layer, {"weights": moe.ExpertWeights(W8, DOWN[:2])}, r"down \[4, 8, 8\]"),
    "second biases of other experts": (
        layer,
        {"weights": moe.ExpertWeights(W8, DOWN, None, torch.ones(1, K))},
        r"down_bias \[4, 8\]",
    ),
    "a layer by no plan": (layer, {"plan": "ring"}, "Use one of sequential, push"),
    "a layer of rows that are no words": (
        layer,
        {"x_shard": X[:, :6], "weights": moe.ExpertWeights(W8[:, :, :6], DOWN[:, :6]), "plan": "push"},
        "no whole words of 16 bytes",
    ),
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


def expert_beyond_all(plan: str | None) -> str:
    """Of ranks that hold whole experts, none of which has the one that a token names."""
    weights = moe.ExpertWeights(W8, DOWN, first=EXPERTS * dist.get_rank())
    with pytest.raises(InputError) as caught:
        layer(topk_ids=IDS + 2 * EXPERTS, weights=weights, plan=plan)
    y = layer(weights=weights, plan=plan)
    return f"{caught.value} {list(y.shape)}"


@pytest.mark.parametrize("plan", [None, "push"])
def test_an_expert_that_no_rank_holds_is_refused(plan: str | None):
    assert all(re.search(r"below 8.*\[3, 8\]", told) for told in run_ranks(expert_beyond_all, 2, plan))


def unlike_tokens(what: str) -> str:
    """What ranks are told whose numbers of tokens differ, of calls that push."""
    tokens = T - dist.get_rank()
    given = X[:tokens], IDS[:tokens]
    try:
        if what == "dispatch":
            moe.dispatch(*given, None, EXPERTS, most=8, plan="push")
        else:
            layer(x_shard=given[0], topk_ids=given[1], topk_weights=None, plan="push")
    except OverweaveError as error:
        return f"{type(error).__name__} {error}"
    return ""


@pytest.mark.parametrize(("what", "sizes"), [("layer", ("6 tokens", "4 tokens")), ("dispatch", ("most 3", "most 2"))])
def test_ranks_with_unlike_tokens_are_told_their_sizes(what: str, sizes: tuple[str, str]):
    for told in run_ranks(unlike_tokens, 2, what):
        assert told.startswith("RankMismatch")
        assert all(size in told for size in sizes)


def differing(what: str) -> str:
    rank = dist.get_rank()
    changed: dict[str, Any] = {
        "experts": {"w": W[: EXPERTS - rank]},
        "slots": {"topk_ids": IDS[:, : 2 - rank]},
        "tokens": {"x_shard": X[: T - rank], "topk_ids": IDS[: T - rank]},
        "gradients": {"x_shard": X.clone().requires_grad_(rank == 0)},
        "glu": {"w": W8, "glu": moe.Glu(interleaved=rank == 0), "plan": "push"},
        "bad input of one": {"topk_ids": IDS[: T - rank]},
    }[what]
    try:
        first(**changed)
    except OverweaveError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("what", ["experts", "slots", "tokens", "gradients", "glu", "bad input of one"])
def test_ranks_that_differ_are_an_error_on_every_rank(what: str):
    told = run_ranks(differing, 2, what)
    assert told == ["RankMismatch", "InputError" if what == "bad input of one" else "RankMismatch"]


# tokens of a rank, hidden size, columns between the matmuls, experts, top
ODD = ((3, 6, 5, 4, 2), (1, 1, 1, 1, 1), (2, 7, 3, 2, 5), (0, 6, 5, 4, 2), (5, 9, 2, 300, 1))


def odd_sizes_wrong() -> list[tuple[int, ...]]:
    """Sizes whose rows are no whole words of 16 bytes, and more slots than experts: those that are not exact."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = list[tuple[int, ...]]()
    for sizes in ODD:
        (t, k, n, experts, top), draw = sizes, torch.Generator().manual_seed(0)
        shapes = ((t * ranks, k), (experts, n * ranks, k), (experts, k, n * ranks))
        x, up, down = (torch.randint(-2, 3, shape, generator=draw).float() for shape in shapes)
        ids = torch.randint(-1, experts, (t * ranks, top), generator=draw, dtype=torch.int32)
        own, inner = slice(rank * t, (rank + 1) * t), slice(rank * n, (rank + 1) * n)
        part = moe.ExpertWeights(up[:, inner].contiguous(), down[:, :, inner].contiguous())
        y = moe.experts_mlp(x[own], ids[own], None, part)
        h = torch.einsum("tk,tsnk->tsn", x, up[ids.clamp(0)])
        products = torch.einsum("tsn,tskn->tsk", h, down[ids.clamp(0)])
        wanted = torch.where(ids[..., None] >= 0, products, 0.0).sum(1)[own]
        wrong += [] if torch.equal(y, wanted) else [sizes]
    return wrong


def test_odd_sizes_are_exact():
    assert run_ranks(odd_sizes_wrong, 2) == [[], []]
