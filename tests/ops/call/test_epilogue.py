"""Bias, activation and residual of `all_gather_matmul` on CPU ranks: every plan against plain torch; bad arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import product
from typing import Any, get_args, get_overloads, get_type_hints

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

import overweave as ow
from overweave.errors import InputError, OverweaveError
from overweave.functional import all_gather_linear, linear_reduce_scatter
from overweave.ir.epilogue import Epilogue
from overweave.ir.operators.registry import operator_of
from overweave.ir.problem import Problem
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog.catalog import build
from tests.ops import reference
from tests.ranks import run_ranks

PLANS = (None, "sequential", "per_shard", "push pieces=2", "pull")
M, N, K = 21, 24, 16
NIGHTLY = pytest.mark.nightly


def wrong_epilogues() -> list[str]:
    """What differs from plain torch by more than two roundings of bf16."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    wrong = []
    shards = torch.randn(M, K).bfloat16().chunk(ranks)
    x, w = (shards[rank] if rank < len(shards) else torch.empty(0, K).bfloat16()), torch.randn(K, N).bfloat16()
    bias, residual = torch.randn(N).bfloat16(), torch.randn(M, N).bfloat16()
    for plan, activation, has_bias, has_residual in product(
        PLANS, (None, "silu", "gelu", "gelu_tanh"), (False, True), (False, True)
    ):
        extras = {"bias": bias if has_bias else None, "residual": residual if has_residual else None}
        y = ow.all_gather_matmul(x, w, m=M, activation=activation, **extras, plan=plan)
        wide = {name: tensor if tensor is None else tensor.float() for name, tensor in extras.items()}
        exact = reference.all_gather_matmul(x.float(), w.float(), m=M, activation=activation, **wide)
        if not torch.allclose(y.float(), exact, rtol=2**-6, atol=2**-5):
            wrong.append(f"{plan} {activation} {has_bias} {has_residual}: {float((y.float() - exact).abs().max())}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_plan_does_what_plain_torch_does(world_size: int):
    assert run_ranks(wrong_epilogues, world_size) == [[]] * world_size


def wrong_gates(m: int) -> list[str]:
    """What differs from plain torch by more than a few roundings of bf16; each call twice, with other tensors."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(m)
    wrong = []
    for plan, activation, has_residual, is_transposed in product(
        PLANS, (None, "silu", "gelu"), (False, True), (False, True)
    ):
        for _ in range(2):
            x = torch.randn(m, K).bfloat16()
            shards, residual = x.chunk(ranks), torch.randn(m, N).bfloat16() if has_residual else None
            shard = shards[rank] if rank < len(shards) else x[:0]
            w, gate = (torch.randn(N, K).bfloat16().t() for _ in range(2))
            if not is_transposed:
                w, gate = w.contiguous(), gate.contiguous()
            given: dict[str, Any] = {"activation": activation, "residual": residual, "gate": gate}
            y = ow.all_gather_matmul(shard, w, m=m, **given, plan=plan)
            wide = residual if residual is None else residual.float()
            exact = reference.all_gather_matmul(
                shard.float(), w.float(), m=m, activation=activation, residual=wide, gate=gate.float()
            )
            if not torch.allclose(y.float(), exact, rtol=2**-5, atol=2**-4):
                wrong.append(f"{plan} {activation} {has_residual}: {float((y.float() - exact).abs().max())}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "ms"),
    [
        (1, (0, 1, 37)),
        (2, (0, 37)),
        (3, (0, 1, 2, 37)),
        (4, (3, 37)),
        pytest.param(4, (0, 1), marks=pytest.mark.nightly),
    ],
)
def test_every_plan_gates(world_size: int, ms: tuple[int, ...]):
    for m in ms:
        assert run_ranks(wrong_gates, world_size, m, timeout_s=100) == [[]] * world_size


def swiglu() -> float:
    """The error of the documented call, relative to the largest element."""
    torch.manual_seed(0)
    x, w_up, w_gate = torch.randn(8, K), torch.randn(K, N), torch.randn(K, N)
    shard = x.chunk(dist.get_world_size())[dist.get_rank()]
    y = ow.all_gather_matmul(shard, w_up, gate=w_gate, activation="silu")
    exact = torch.nn.functional.silu(x @ w_gate) * (x @ w_up)
    return float((y - exact).abs().max() / exact.abs().max())


def test_swiglu():
    assert all(error < 1e-6 for error in run_ranks(swiglu, 2))


def moved_extras() -> bool:
    """The second call of a signature reads its own bias, not that of the first."""
    x, w = torch.ones(2, K), torch.ones(K, N)
    first, second = (ow.all_gather_matmul(x, w, bias=torch.full((N,), by)) for by in (1.0, 2.0))
    return torch.equal(first + 1, second)


def test_each_call_reads_its_own_tensors():
    assert run_ranks(moved_extras, 2) == [True, True]


def errors_of_bad_extras() -> list[str]:
    x, w = torch.ones(2, K), torch.ones(K, N)
    found = []
    for extras in (
        {"bias": torch.ones(N + 1)},
        {"bias": torch.ones(N).double()},
        {"bias": [1.0] * N},
        {"residual": torch.ones(2, N)},
        {"residual": torch.ones(N, 2 * dist.get_world_size()).t()},
        {"activation": "relu"},
        {"gate": torch.ones(K, N + 1)},
        {"gate": torch.ones(N, K).t()},
        {"gate": torch.ones(K, N), "bias": torch.ones(N)},
    ):
        try:
            ow.all_gather_matmul(x, w, **extras)
            found.append("nothing raised")
        except OverweaveError as error:
            found.append(f"{type(error).__name__} {error}")
    return found


def test_bad_arguments_are_typed_errors_on_every_rank():
    words = ("bias", "float32", "list", "residual", "row-major", "silu, gelu, gelu_tanh")
    words += ("gate: got [16, 25]", "memory layout of w", "a bias beside a gate")
    for of_rank in run_ranks(errors_of_bad_extras, 2):
        assert all(found.startswith("InputError") for found in of_rank), of_rank
        assert all(word in found for word, found in zip(words, of_rank, strict=True)), of_rank


NAMES = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@pytest.mark.parametrize("name", NAMES)
def test_a_signature_has_the_keywords_of_the_record(name: str):
    _, _, group, *keywords, others = inspect.signature(getattr(ow, name)).parameters.values()
    assert tuple(each.name for each in keywords) == operator_of(name).keywords
    assert {each.kind for each in keywords} == {inspect.Parameter.KEYWORD_ONLY}
    assert (group.name, others.kind) == ("group", inspect.Parameter.VAR_KEYWORD)


def keywords_of_overload(function: Callable[..., Any]) -> set[str]:
    """Those that it names, and those of the dictionary whose entries it takes."""
    named = {each.name for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY}
    (others,) = get_args(get_type_hints(function)["keywords"])
    return named | {*others.__annotations__}


@pytest.mark.parametrize(
    "function",
    [ow.all_gather_matmul, ow.matmul_reduce_scatter, ow.matmul_all_reduce, all_gather_linear, linear_reduce_scatter],
)
def test_overloads_have_the_keywords_of_the_signature(function: Callable[..., Any]):
    parameters = inspect.signature(function).parameters.values()
    keywords = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert set().union(*map(keywords_of_overload, get_overloads(function))) == keywords


def what_unknown_keywords_get() -> dict[str, list[str]]:
    """Of every operator: what it says of a keyword that it has not, behind a call that prepared the signature."""
    told: dict[str, list[str]] = {}
    x, w = torch.ones(2, K), torch.ones(K, N)
    for name in NAMES:
        call: Any = getattr(ow, name)
        call(x, w)
        for keyword in ("extras", "gate", "norm", "biass", "m"):
            if keyword not in operator_of(name).keywords:
                with pytest.raises(InputError) as raised:
                    call(x, w, **{keyword: None})
                told.setdefault(keyword, []).append(str(raised.value))
    return told


def test_keywords_that_an_operator_has_not_are_refused_with_those_that_it_has():
    for told in run_ranks(what_unknown_keywords_get, 2):
        assert [len(told[keyword]) for keyword in ("extras", "gate", "norm", "biass", "m")] == [3, 2, 1, 3, 2]
        for keyword, words in told.items():
            assert all(f"{keyword}=: it takes no such keyword. It takes " in word for word in words)
            assert all("bias=, activation=, residual=" in word for word in words)
        assert all("gate= is taken by all_gather_matmul" in word for word in told["gate"])
        assert all("norm= is taken by matmul_reduce_scatter, matmul_all_reduce" in word for word in told["norm"])


def ask_for_different_ends() -> str:
    x, w = torch.ones(2, K), torch.ones(K, N)
    try:
        ow.all_gather_matmul(x, w, activation="silu" if dist.get_rank() else None)
    except OverweaveError as error:
        return type(error).__name__
    return "nothing raised"


def test_ranks_agree_on_the_epilogue():
    assert run_ranks(ask_for_different_ends, 2) == ["RankMismatch"] * 2


def test_products_that_are_parts_of_a_sum_are_not_finished():
    shape = {"m": 8, "n": 8, "k": 8, "world_size": 2, "dtype": "bfloat16", "epilogue": Epilogue(activation="silu")}
    gather = build("all_gather_matmul.push", Problem(operator="all_gather_matmul", **shape), {})
    assert verify_plan(gather, MachineLimits()).ok
    terms = tuple(replace(goal, terms=((0, 4), (4, 8))) for goal in gather.schedule.goal)
    summed = replace(gather, schedule=replace(gather.schedule, goal=terms))
    assert not verify_plan(summed, MachineLimits()).ok
