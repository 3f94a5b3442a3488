"""Attention that ranks split: exact, whatever is asked; compiled and checkpointed; bad input; ranks that differ."""

from __future__ import annotations

import random
import re
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from campaigns.exact import attention_exactness
from overweave import context_parallel_attention
from overweave.attention.pieces import Merged
from overweave.errors import InputError, OverweaveError, PeerError
from overweave.schedules.records.attention import PLANS
from tests.ranks import run_ranks

OFF = attention_exactness.MOST_OFF


def errors_of(told: list[Any]) -> tuple[dict[str, float], list[str]]:
    return attention_exactness.ratios(sums for sums, _ in told), [line for _, lines in told for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("world_size", "dtype"), [(2, "bfloat16"), (3, "float32")])
def test_random_sequences(world_size: int, dtype: str, plan: str):
    told = run_ranks(attention_exactness.tried, world_size, plan, 8, world_size, dtype, timeout_s=120)
    ratios, wrong = errors_of(told)
    assert not wrong
    assert max(ratios.values()) <= OFF, ratios


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("world_size", [4, 8])
def test_more_random_sequences(world_size: int, plan: str):
    ratios, wrong = errors_of(run_ranks(attention_exactness.tried, world_size, plan, 12, 1, "bfloat16", timeout_s=600))
    assert not wrong
    assert max(ratios.values()) <= OFF, ratios


def tried_spoiled(plan: str) -> Any:
    """With a merge that forgets log-sum-exps."""
    honest = Merged.add

    def forgetful(self: Merged, queries: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        honest(self, queries, out, torch.zeros_like(lse))

    with patch.object(Merged, "add", forgetful):
        return attention_exactness.tried(plan, 5, 0, "float32")


@pytest.mark.slow
def test_a_wrong_merge_is_noticed():
    ratios, wrong = errors_of(run_ranks(tried_spoiled, 2, "per_shard"))
    assert wrong
    assert ratios["out"] > OFF


def leaves() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(1, heads, 8, 16, generator=draw).requires_grad_() for heads in (4, 2, 2)]


def as_torch_wants(plan: str) -> list[bool]:
    """Whether results and gradients are the same bits under torch.compile and behind activation checkpointing."""
    torch._dynamo.reset()

    def attention(*given: torch.Tensor) -> Any:
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "sequence": "zigzag", "plan": plan}
        return context_parallel_attention(*given, **options)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    found = []
    for way in (attention, compiled, lambda *given: checkpoint(attention, *given, use_reentrant=False)):
        given = leaves()
        out = way(*given)
        out.square().sum().backward()
        found.append([out.detach(), *(each.grad for each in given)])
    return [torch.equal(one, each) for other in found[1:] for one, each in zip(found[0], other, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_it_is_compiled_and_checkpointed(plan: str):
    assert all(map(all, run_ranks(as_torch_wants, 2, plan, timeout_s=120)))


def of_few_tokens() -> list[list[int]]:
    """Nothing, and one token of one rank, which sees itself."""
    shapes = []
    for tokens in (0, 1):
        own = tokens if dist.get_rank() == 0 else 0
        for plan in PLANS:
            x = torch.ones(1, 2, own, 8, requires_grad=True)
            out = context_parallel_attention(x, x, x, tokens=tokens, plan=plan)
            out.sum().backward()
            assert torch.equal(out, x)
            shapes.append(list(x.grad.shape))  # type: ignore[union-attr]
    return shapes


def test_ranks_without_tokens_take_part():
    assert run_ranks(of_few_tokens, 2) == [[[1, 2, n, 8] for n in own for _ in PLANS] for own in ((0, 1), (0, 0))]


def of_odd_shapes() -> list[str]:
    """Heads of one column or three, no batch, no heads: what is not as torch has it of all rows."""
    rank, wrong = dist.get_rank(), []
    for b, h, d in ((2, 2, 1), (1, 2, 1), (2, 2, 3), (0, 2, 4), (2, 0, 4)):
        draw = torch.Generator().manual_seed(0)
        whole = [torch.randn(b, h, 8, d, generator=draw).requires_grad_() for _ in "qkv"]
        wanted = functional.scaled_dot_product_attention(*whole, is_causal=True)
        wanted.square().sum().backward()
        for plan in PLANS:
            own = [each.detach().chunk(2, 2)[rank].requires_grad_() for each in whole]
            out = context_parallel_attention(*own, is_causal=True, plan=plan)
            out.square().sum().backward()
            pairs = zip((out, *(each.grad for each in own)), (wanted, *(each.grad for each in whole)), strict=True)
            if not all(torch.allclose(one, all_.chunk(2, 2)[rank], atol=1e-5) for one, all_ in pairs):  # type: ignore
                wrong.append(f"{plan} of {b, h, d}")
    return wrong


def test_odd_shapes_are_as_of_torch():
    assert run_ranks(of_odd_shapes, 2) == [[], []]


def under_autocast() -> list[bool]:
    """Whether all plans have the bits that they have without it."""
    own, found = leaves(), []
    for plan in PLANS:
        alone = context_parallel_attention(*own, is_causal=True, enable_gqa=True, plan=plan)
        with torch.autocast("cpu", torch.bfloat16):
            cast = context_parallel_attention(*own, is_causal=True, enable_gqa=True, plan=plan)
        found.append(torch.equal(alone, cast))
    return found


def test_autocast_rounds_nothing_inside():
    assert all(map(all, run_ranks(under_autocast, 2)))


def differentiated_twice() -> str:
    x = torch.ones(1, 2, 4, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(context_parallel_attention(x, x, x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError) as caught:
        dx.square().sum().backward()
    return str(caught.value)


def test_gradients_of_gradients_are_refused():
    assert all("differentiate once" in told for told in run_ranks(differentiated_twice, 2))


def of_sizes_in_turn() -> None:
    torch._dynamo.reset()

    def attention(x: torch.Tensor, tokens: int) -> Any:
        return context_parallel_attention(x, x, x, tokens=tokens, plan="sequential")

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for rows in (4, 5, 6):
        x = torch.ones(1, 2, rows, 8)
        assert torch.allclose(compiled(x, 2 * rows), x)


@pytest.mark.slow
def test_a_compiled_call_takes_other_lengths():
    run_ranks(of_sizes_in_turn, 2, timeout_s=120)


X, DOCUMENTS = torch.ones(1, 4, 3, 8), torch.tensor([0, 2, 6], dtype=torch.int32)


def packed(cu_seqlens: torch.Tensor, **beside: Any) -> dict[str, Any]:
    """Of tokens of documents."""
    return dict.fromkeys("qkv", torch.ones(3, 4, 8)) | {"cu_seqlens": cu_seqlens} | beside


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no batch": ({"q": X[0]}, r"q is \[4, 3, 8\]"),
    "heads of no column": (dict.fromkeys("qkv", X[..., :0]), "at least one column"),
    "no tensor": ({"v": None}, "v is a NoneType"),
    "other tokens of k": ({"k": X[:, :, :2], "v": X[:, :, :2]}, "alike but for heads"),
    "another width of v": ({"v": X[..., :4]}, "alike but for heads"),
    "grouped heads, unasked": ({"k": X[:, :2], "v": X[:, :2]}, "enable_gqa=True"),
    "heads that do not divide": ({"k": X[:, :3], "v": X[:, :3], "enable_gqa": True}, "heads that k's divide"),
    "dtypes that differ": ({"k": X.bfloat16()}, "torch.bfloat16 on cpu, torch.float32 on cpu"),
    "whole numbers": (dict.fromkeys("qkv", X.int()), "bf16 or fp16"),
    "a layout that nobody knows": ({"sequence": "striped"}, "contiguous, zigzag"),
    "zigzag of odd pieces": ({"sequence": "zigzag"}, "Pad to a multiple of 4"),
    "tokens dealt otherwise": ({"tokens": 9}, "passes 3 of tokens=9"),
    "a sparse tensor": ({"q": X.to_sparse()}, "q is torch.sparse_coo"),
    "a list of plans": ({"plan": ["ring"]}, "sequential, per_shard"),
    "no such plan": ({"plan": "push"}, "sequential, per_shard, ring, double_ring, heads"),
    "a window of nothing": ({"window": 0, "is_causal": True}, "its own the last"),
    "a window that sees ahead": ({"window": 2}, "is_causal=True"),
    "a window over documents": (packed(DOCUMENTS, window=2, is_causal=True, plan="ring"), "contiguous rows"),
    "heads that ranks do not divide": (dict.fromkeys("qkv", X[:, :3]) | {"plan": "heads"}, "ranks do not divide 3"),
    "a batch of documents": ({"cu_seqlens": DOCUMENTS}, "packed tokens"),
    "offsets in floats": (packed(DOCUMENTS.float()), "float32"),
    "a mask in words": ({"is_causal": "yes"}, "is_causal.*got 'yes'.*True or False"),
    "no number": ({"scale": "small"}, "scale.*got 'small'"),
    "falling offsets": (packed(DOCUMENTS.flip(0)), r"\[6, 2, 0\]"),
    "falling offsets, by heads": (packed(DOCUMENTS.flip(0), plan="heads"), r"\[6, 2, 0\]"),
    "offsets beyond the end": (packed(DOCUMENTS + 1), "within 6 tokens"),
}


def refused() -> list[str]:
    told = []
    for changed, _ in BAD.values():
        with pytest.raises(InputError) as caught:
            context_parallel_attention(**({"q": X, "k": X, "v": X} | changed))
        told.append(str(caught.value))
    return told


def test_bad_input_is_refused_on_every_rank():
    for told in run_ranks(refused, 2):
        for text, (_, pattern) in zip(told, BAD.values(), strict=True):
            assert re.search(pattern, text), (text, pattern)


DIFFERING: dict[str, dict[str, Any]] = {
    "mask": {"is_causal": True},
    "scale": {"scale": 1.0},
    "plan": {"plan": "ring"},
    "heads": dict.fromkeys("qkv", X[:, :2]),
    "gradients": {"q": X.clone().requires_grad_()},
}


def differing(what: str) -> str:
    changed = DIFFERING[what] if dist.get_rank() else {}
    try:
        context_parallel_attention(**({"q": X, "k": X, "v": X, "plan": "per_shard"} | changed))
    except OverweaveError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("what", DIFFERING)
def test_ranks_that_differ_are_an_error_on_every_rank(what: str):
    assert run_ranks(differing, 2, what) == ["RankMismatch"] * 2


def with_an_absent_rank(plan: str) -> str:
    x = torch.ones(1, 2, 4, 8)
    context_parallel_attention(x, x, x, plan=plan)
    if dist.get_rank() == 1:
        time.sleep(3.0)
        return "absent"
    try:
        context_parallel_attention(x, x, x, plan=plan)
    except PeerError as error:
        return type(error).__name__
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["per_shard", "ring", pytest.param("double_ring", marks=pytest.mark.nightly)])
def test_who_waits_for_an_absent_rank_says_so(plan: str):
    told = run_ranks(with_an_absent_rank, 3, plan, group_timeout_s=1.0)
    assert told == ["PeerTimeout", "absent", "PeerTimeout"]


def calls_in_two_places(plan: str, calls: int) -> list[int]:
    """How many calls had other bits than the first, and gradients other than theirs, a random rank late in each."""
    chance, draw = random.Random(0), torch.Generator().manual_seed(dist.get_rank())
    given = [torch.randn(1, 2, 4, 8, generator=draw).requires_grad_() for _ in "qkv"]
    first: list[torch.Tensor] = []
    wrong = [0, 0]
    for _ in range(calls):
        late = chance.randrange(2 * dist.get_world_size())
        if late == dist.get_rank():
            time.sleep(chance.random() / 500)
        out = context_parallel_attention(*given, is_causal=True, sequence="zigzag", plan=plan)
        found = [out.detach(), *torch.autograd.grad(out.square().sum(), given)]
        first = first or found
        wrong[0] += not torch.equal(found[0], first[0])
        wrong[1] += not all(map(torch.equal, found[1:], first[1:]))
    return wrong


@pytest.mark.parametrize("plan", ["ring", "double_ring"])
@pytest.mark.parametrize("calls", [4, pytest.param(500, marks=pytest.mark.nightly)])
def test_places_that_are_used_by_turns_keep_calls_apart(calls: int, plan: str):
    """Four ranks, so that places are written again within a call: 500 calls, and as many of gradients."""
    assert run_ranks(calls_in_two_places, 4, plan, calls, timeout_s=1200) == [[0, 0]] * 4


def test_tangents_are_refused():
    for found in run_ranks(with_tangent, 1):
        assert "context_parallel_attention: q: it has a tangent" in found


def with_tangent() -> str:
    q = torch.ones(1, 1, 4, 8)
    with pytest.raises(InputError) as refused:
        torch.func.jvp(lambda q: context_parallel_attention(q, q, q), (q,), (q,))
    return str(refused.value)
