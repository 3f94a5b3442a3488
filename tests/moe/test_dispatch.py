"""Tokens on their way to experts of other ranks: once to each rank, within a bound, back in order; bad input."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overweave import moe
from overweave.errors import InputError, OverweaveError
from overweave.ops.dispatch.collectives import exchange_in
from tests.ranks import run_ranks

EXPERTS, HIDDEN = 6, 4


def drawn(*shape: int, low: int = -3, high: int = 4) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(dist.get_rank()))


def travelled() -> dict[str, Any]:
    """Tokens whose two experts live on one rank, and on two; one token without an expert."""
    ids = torch.tensor([[0, 1], [0, 5], [-1, -1]], dtype=torch.int32)
    x = torch.full((3, HIDDEN), 10.0 * dist.get_rank()) + torch.arange(3.0)[:, None]
    sent = moe.dispatch(x, ids, torch.tensor([[0.5, 2.0]] * 3), EXPERTS, most=7)
    back = moe.combine(sent.x * (1 + dist.get_rank()), sent)
    return {
        "rows": sent.x[:, 0].tolist(),
        "ids": sent.topk_ids.tolist(),
        "weights": sent.topk_weights.tolist() if sent.topk_weights is not None else [],
        "back": back[:, 0].tolist(),
    }


def test_a_token_travels_once_to_each_rank():
    first, second = run_ranks(travelled, 2)
    assert first["rows"] == [0, 1, 10, 11, 0, 0, 0]
    assert first["ids"] == [[0, 1], [0, -1], [0, 1], [0, -1], *[[-1, -1]] * 3]
    assert first["weights"] == [[0.5, 2], [0.5, 0], [0.5, 2], [0.5, 0], *[[0, 0]] * 3]
    assert second["rows"] == [1, 11, 0, 0, 0, 0, 0]
    assert second["ids"][:3] == [[-1, 2], [-1, 2], [-1, -1]]
    assert first["back"] == [0, 1 + 2, 0]  # of two ranks, each multiplied by its number
    assert second["back"] == [10, 11 + 22, 0]


PLANS = ("sequential", "push")


def kinds(plan: str) -> list[bool]:
    """Rows of every dtype arrive as they are."""
    found = []
    ids = drawn(5, 2, low=0, high=EXPERTS)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64):
        x = drawn(5, HIDDEN).float().to(dtype)
        exact = moe.dispatch(x.double(), ids, None, EXPERTS, most=11)
        found.append(torch.equal(moe.dispatch(x, ids, None, EXPERTS, most=11, plan=plan).x.double(), exact.x))
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_rows_of_any_dtype_travel(plan: str):
    assert run_ranks(kinds, 2, plan) == [[True] * 5] * 2


def differences(hidden: int, tokens: int) -> list[str]:
    """What differs between both plans."""
    rank = dist.get_rank()
    own = max(0, tokens - 2 * rank)
    x, ids = drawn(own, hidden).bfloat16(), drawn(own, 3, low=-1, high=EXPERTS)
    weights, most = drawn(own, 3).float(), 3 * tokens
    found = []
    results = []
    for plan in (None, moe.Push(tokens, sms=2)):
        sent = moe.dispatch(x, ids, weights, EXPERTS, most=most, plan=plan)
        results.append((sent.x, sent.topk_ids, sent.topk_weights, moe.combine(sent.x * (rank + 1), sent)))
    for name, by_library, pushed in zip(("x", "ids", "weights", "y"), *results, strict=True):
        if pushed.dtype != by_library.dtype or not torch.equal(pushed, by_library):
            found.append(name)
    return found


@pytest.mark.parametrize(("hidden", "tokens"), [(8, 5), (3, 7), (40, 2)])
def test_what_is_pushed_is_what_the_library_sends(hidden: int, tokens: int):
    """Ranks with unlike numbers of tokens, one with none; rows that are no whole words."""
    assert run_ranks(differences, 3, hidden, tokens) == [[]] * 3


def scaled(plan: str) -> list[bool]:
    x, scales = drawn(6, 32).float().to(torch.float8_e4m3fn), drawn(6, 3).float()
    ids = drawn(6, 2, low=-1, high=EXPERTS)
    exact = moe.dispatch(x.float(), ids, None, EXPERTS, most=13)
    of_scales = moe.dispatch(scales, ids, None, EXPERTS, most=13)
    sent = moe.dispatch((x, scales), ids, None, EXPERTS, most=13, plan=plan)
    assert sent.scales is not None
    return [torch.equal(sent.x.float(), exact.x), torch.equal(sent.scales, of_scales.x), sent.topk_weights is None]


@pytest.mark.parametrize("plan", PLANS)
def test_scales_travel_with_rows_in_fp8(plan: str):
    assert run_ranks(scaled, 2, plan) == [[True] * 3] * 2


def overflowing() -> list[bool | int]:
    """One rank would receive more than the bound, the other would not."""
    x, ids = torch.ones(3, HIDDEN), torch.zeros(3, 1, dtype=torch.int32)
    sent = moe.dispatch(x, ids, torch.ones(3, 1), EXPERTS, most=5, plan="push")
    y = moe.combine(torch.ones(5, HIDDEN), sent)
    right = moe.dispatch(x, ids, None, EXPERTS, most=6, plan="push")
    assert sent.reason is not None
    assert right.reason is not None
    is_void = bool(sent.x.isnan().all() and (sent.topk_ids == -1).all() and y.isnan().all())
    return [int(sent.reason), is_void, int(right.reason), bool(torch.equal(moe.combine(right.x, right), x))]


def test_more_rows_than_the_bound_are_void_on_every_rank():
    assert run_ranks(overflowing, 2) == [[4, True, 0, True]] * 2


def test_no_token_at_all_comes_back_as_none():
    assert run_ranks(of_nobody, 3) == [[0, 0]] * 3


def of_nobody() -> list[int]:
    x, ids = torch.ones(0, HIDDEN), torch.ones(0, 2, dtype=torch.int32)
    sent, pushed = (moe.dispatch(x, ids, None, EXPERTS, most=0, plan=plan) for plan in PLANS)
    return [len(sent.x) + len(pushed.x), len(moe.combine(sent.x, sent)) + len(moe.combine(pushed.x, pushed))]


def one_sided_gradients(plan: str) -> list[bool]:
    """A rank that makes nothing of what it received takes part in the gradients of its peers."""
    x = drawn(4, HIDDEN).float().requires_grad_()
    weights = torch.ones(4, 1, requires_grad=True)
    sent = moe.dispatch(x, torch.zeros(4, 1, dtype=torch.int32), weights, EXPERTS, most=8, plan=plan)
    assert sent.topk_weights is not None
    parts = sent.x * sent.topk_weights if dist.get_rank() == 0 else torch.zeros(len(sent.x), HIDDEN)
    moe.combine(parts, sent).sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return [torch.equal(x.grad, torch.ones_like(x)), torch.equal(weights.grad, x.detach().sum(1, keepdim=True))]


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_come_back_whatever_a_rank_does_between(plan: str):
    assert run_ranks(one_sided_gradients, 2, plan) == [[True, True]] * 2


def told_of_ops() -> list[str]:
    """What torch.library.opcheck says of the ops of `push`."""
    ops, options = torch.ops.overweave, exchange_in(None, "a check").options | {"shard": 4, "sms": 2}
    x, weights = drawn(4, HIDDEN).float().requires_grad_(), torch.ones(4, 2, requires_grad=True)
    given, sizes = (x, None, weights, drawn(4, 2, low=0, high=EXPERTS)), {"experts": EXPERTS, "most": 8}
    *_, anchor, tokens, starts, positions, received = ops.dispatch_pushed(*given, **options, **sizes)
    parts, anchor = torch.ones(8, HIDDEN, requires_grad=True), anchor.detach().requires_grad_()
    said = torch.library.opcheck(ops.dispatch_pushed.default, given, options | sizes)
    said |= torch.library.opcheck(
        ops.combine_pushed.default, (parts, anchor, tokens, starts, positions, received), options
    )
    more = torch.library.opcheck(ops.send_pushed.default, (x.detach(), tokens, starts), options | {"most": 8})
    return sorted({*said.values(), *more.values()})


@pytest.mark.slow
def test_ops_pass_torchs_own_checks():
    assert run_ranks(told_of_ops, 2, timeout_s=120) == [["SUCCESS"]] * 2


X, IDS = torch.ones(3, HIDDEN), torch.zeros(3, 2, dtype=torch.int32)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "rows of a batch": ((X[None], IDS, None, EXPERTS), {}, r"got \[1, 3, 4\]"),
    "ids of other tokens": ((X, IDS[:2], None, EXPERTS), {}, r"topk_ids \[3, top\]: got \[2, 2\]"),
    "ids that are floats": ((X, IDS.float(), None, EXPERTS), {}, "got torch.float32"),
    "no slot": ((X, IDS[:, :0], None, EXPERTS), {}, r"got \[3, 0\]"),
    "an expert too many": ((X, IDS + EXPERTS, None, EXPERTS), {}, "they are 6 to 6"),
    "weights of other slots": ((X, IDS, torch.ones(3, 1), EXPERTS), {}, r"topk_weights \[3, 2\]"),
    "weights that are ints": ((X, IDS, IDS, EXPERTS), {}, "got torch.int32"),
    "no expert": ((X, IDS, None, 0), {}, "experts, of all ranks: got 0"),
    "a bound that is none": ((X, IDS, None, EXPERTS), {"most": 1.5}, "got 1.5"),
    "another plan": ((X, IDS, None, EXPERTS), {"plan": "ring"}, "Use sequential, push"),
    "no bound to push in": ((X, IDS, None, EXPERTS), {"plan": "push"}, "Pass most="),
    "no SM": ((X, IDS, None, EXPERTS), {"most": 6, "plan": moe.Push(sms=0)}, "sms=0"),
    "a bound of fewer tokens": ((X, IDS, None, EXPERTS), {"most": 6, "plan": moe.Push(tokens=2)}, "this rank has 3"),
    "scales of other rows": (((X.to(torch.float8_e4m3fn), X[:2]), IDS, None, EXPERTS), {}, r"float32 \[2, 4\] beside"),
    "scales of rows in fp32": (((X, X), IDS, None, EXPERTS), {}, "Pass fp8"),
    "three tensors": (((X, X, X), IDS, None, EXPERTS), {}, "got 3 tensors"),
    "more rows than the bound": ((X, IDS, None, EXPERTS), {"most": 5}, "rank 0 receives 6"),
}


def refused() -> list[str]:
    told = []
    for given, options, _ in BAD.values():
        with pytest.raises(InputError) as caught:
            moe.dispatch(*given, **options)
        told.append(str(caught.value))
    sent = moe.dispatch(X, IDS, None, EXPERTS)
    with pytest.raises(InputError) as caught:
        moe.combine(sent.x[:0] if len(sent.x) else torch.ones(1, HIDDEN), sent)
    told.append(str(caught.value))
    with pytest.raises(InputError) as caught:
        moe.combine(sent.x, sent.x)  # type: ignore[arg-type]
    return [*told, str(caught.value)]


def test_bad_input_is_refused_on_every_rank():
    for told in run_ranks(refused, 2):
        for text, pattern in zip(
            told, [*(pattern for *_, pattern in BAD.values()), "a row for each received", "got Tensor"], strict=True
        ):
            assert re.search(pattern, text), (text, pattern)


def differing(what: str) -> str:
    """What a rank says when ranks differ."""
    rank = dist.get_rank()
    experts, top = EXPERTS + rank * (what == "experts"), 2 - rank * (what == "top")
    x = X if what != "gradients" or rank else X.clone().requires_grad_()
    ids = IDS + EXPERTS if what == "a bad id of one" and rank else IDS
    more: dict[str, Any] = {"most": 6, "plan": moe.Push(sms=2 + rank)} if what == "SMs" else {}
    if what == "tokens":
        x, ids, more = X[: 3 - rank], ids[: 3 - rank], {"most": 6, "plan": "push"}
    try:
        moe.dispatch(x, ids[:, :top], None, experts, **more)
    except OverweaveError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("what", ["experts", "top", "gradients", "SMs", "tokens", "a bad id of one"])
def test_ranks_that_differ_are_an_error_on_every_rank(what: str):
    told = run_ranks(differing, 2, what)
    assert "RankMismatch" in told[0]
    assert ("InputError" if what == "a bad id of one" else "RankMismatch") in told[1]
