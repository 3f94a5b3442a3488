"""What the operators refuse, as one table: the call, and a word of what every rank is told; and calls that differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from overweave.errors import InputError, OverweaveError
from overweave.ir.operators.registry import operator_of
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from tests.ranks import run_ranks

AG, RS, AR = NAMES = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
FP8 = torch.float8_e4m3fn
ROWS, N, K = 4, 48, 32
ones = torch.ones
X, W, BIAS = ones(ROWS, K), ones(K, N), ones(N)
X8, W8 = X.to(FP8), ones(N, K).to(FP8).t()
ONE, TWO, BY_ROW, BY_COLUMN = ones(1), ones(2), ones(ROWS, 1), ones(1, N)
NORM = ow.RmsNorm(BIAS)
Given = dict[str, Any]

# Of a call whose operands are fp32: what is given beside them, or in their place.
PLAIN: tuple[tuple[tuple[str, ...], Given, str], ...] = (
    ((AG, RS, AR), {"bias": ones(N + 1)}, "bias"),
    ((AG, RS, AR), {"bias": BIAS.double()}, "float32"),
    ((AG, RS, AR), {"bias": [1.0] * N}, "list"),
    ((AG,), {"residual": ones(ROWS, N)}, "residual"),
    ((AG,), {"residual": ones(N, 2 * ROWS).t()}, "row-major"),
    ((RS,), {"residual": ones(ROWS, N)}, "[2, 48]"),  # of all rows, not the own ones
    ((AR,), {"residual": ones(2, N)}, "[4, 48]"),
    ((AG, RS, AR), {"activation": "relu"}, "silu, gelu, gelu_tanh"),
    ((AG,), {"gate": ones(K, N + 1)}, "gate: got [32, 49]"),
    ((AG,), {"gate": ones(N, K).t()}, "memory layout of w"),
    ((AG,), {"gate": W, "bias": BIAS}, "a bias beside a gate"),
    ((RS, AR), {"gate": W}, "gate"),
    ((RS, AR), {"norm": ow.RmsNorm(ones(N + 1))}, "norm_weight"),
    ((RS, AR), {"norm": ow.RmsNorm(BIAS.double())}, "float32"),
    ((RS, AR), {"norm": ow.RmsNorm([1.0] * N)}, "list"),  # type: ignore[arg-type]
    ((AR,), {"norm": ow.RmsNorm(BIAS, ones(3, N))}, "residual"),
    ((AR,), {"norm": ow.RmsNorm(BIAS, ones(N, ROWS).t())}, "contiguous"),
    ((RS, AR), {"norm": ow.RmsNorm(BIAS, eps=0.0)}, "eps"),
    ((RS, AR), {"norm": ow.RmsNorm(BIAS, eps=1)}, "eps"),
    ((RS, AR), {"norm": BIAS}, "RmsNorm or None"),
    ((RS, AR), {"norm": NORM, "bias": BIAS}, "beside a norm"),
    ((RS, AR), {"norm": NORM, "activation": "silu"}, "silu beside a norm"),
    ((RS, AR), {"norm": NORM, "activation": "silu", "w": W.clone().requires_grad_()}, "silu beside a norm"),
    ((AR,), {"norm": ow.RmsNorm(BIAS, ones(ROWS, N)), "residual": ones(ROWS, N)}, "Pass one of the two"),
    ((AR,), {"norm": NORM, "plan": "torch.one_shot"}, "torch's"),
    ((AR,), {"bias": BIAS, "plan": "torch.two_shot"}, ""),
    ((AG,), {"w": []}, "got 0 weights"),
    ((AG,), {"w": [W, "w"]}, "w[1]: got str"),
    ((AG,), {"w": [W, W.half()]}, "w[1] is torch.float16"),
    ((AG,), {"w": [W, ones(K + 1, 8)]}, "w[1] is [33, 8]"),
    ((AG,), {"w": [W, ones(8, K).t()]}, "they lie as [k, n], [n, k]"),
    ((AG,), {"w": [W, W[:, ::2]]}, "w[1] [32, 24] has strides (48, 2)"),
    ((AG,), {"w": [W] * 65}, "got 65 weights"),
    ((AG,), {"w": [W] * 4, "plan": "push"}, "4 weights"),
    ((AG,), {"w": [W, W], "residual": ones(2 * ROWS, 2 * N)}, "2 weights: all_gather_matmul with residual takes one"),
    ((AG,), {"w": [W, W], "gate": W}, "2 weights: all_gather_matmul with gate takes one"),
    ((AG,), {"w": [W, W], "bias": BIAS}, "bias: got [48] of"),
    ((AG,), {"w": (each for each in (W, W))}, "got generator"),
    (NAMES, {"x": ones(K)}, "x [rows, cols]: got [32]"),
    (NAMES, {"w": torch.zeros(())}, "w [rows, cols]: got []"),
    (NAMES, {"x": X.double(), "w": W.double()}, "got torch.float64"),
    (NAMES, {"x": X.int(), "w": W.int()}, "got torch.int32"),
    (NAMES, {"w": W.half()}, "x is torch.float32 on cpu, w is torch.float16"),
    (NAMES, {"w": W.to("meta")}, "w is torch.float32 on meta"),
    (NAMES, {"x": X.to("meta"), "w": W.to("meta")}, "got meta"),
    (NAMES, {"w": ones(N, K)}, "x is [4, 32], w is [48, 32]"),
    (NAMES, {"x": X[:, :0], "w": W[:0]}, "both at least 1: got [0, 48]"),
    (NAMES, {"w": W[:, :0]}, "both at least 1: got [32, 0]"),
    (NAMES, {"x": ones(K, ROWS).t()}, "its strides are (1, 4)"),
    (NAMES, {"x": ones(ROWS, 2 * K)[:, ::2]}, "its strides are (64, 2)"),
    (NAMES, {"w": ones(K, 2 * N)[:, ::2]}, "w [32, 48] has strides (96, 2)"),
    (NAMES, {"w": ones(1, N).expand(K, N)}, "has strides (0, 1)"),
    (NAMES, {"x": None}, "x: got NoneType"),
    (NAMES, {"x": X.numpy()}, "x: got ndarray"),
    (NAMES, {"x": X.to_sparse()}, "its layout is torch.sparse_coo"),
    ((AG,), {"m": 3.0}, "m: got float. Pass int or None"),
    ((AG,), {"m": True}, "m: got bool. Pass int or None"),
    (NAMES, {"plan": 3}, "plan: got int"),
    (NAMES, {"plan": ["push"]}, "plan: got list"),
    ((AG,), {"return_gathered": None}, "return_gathered: got NoneType. Pass bool"),
    (NAMES, {"residual": X.to_sparse()}, "residual: its layout is torch.sparse_coo"),
    (NAMES, {"activation": torch.nn.functional.silu}, "activation: got function. Pass str or None"),
    (NAMES, {"out_dtype": "bfloat16"}, "out_dtype: got str. Pass dtype or None"),
    ((RS, AR), {"x": ones(ROWS, 32), "w": ones(32, 3), "plan": "waves"}, "n=3"),
    ((AR,), {"w": ones(K, 3), "plan": "two_shot"}, "16 bytes"),
    ((AR,), {"w": ones(K, 3), "plan": "one_shot_packed"}, "16 bytes"),
    ((AR,), {"w": ones(K, 3), "plan": "two_shot_packed"}, "16 bytes"),
    ((AR,), {"w": ones(K, 3), "plan": "ring_stored"}, "16 bytes"),
)
# Of a call whose operands are fp8. Each is refused by every operator that has the form.
IN_FP8: tuple[tuple[tuple[str, ...], Given, str], ...] = (
    (NAMES, {}, "scale_x of fp8 operands"),
    (NAMES, {"scale_x": ONE}, "scale_w of fp8 operands: got None"),
    (NAMES, {"scale_x": ONE, "scale_w": BY_COLUMN}, "Pass one element each"),
    (NAMES, {"scale_x": ones(2 * ROWS, 1), "scale_w": BY_COLUMN}, "(4, 1) for the own rows"),
    (NAMES, {"scale_x": BY_ROW, "scale_w": BY_COLUMN.double()}, "float64"),
    (NAMES, {"scale_x": BY_ROW, "scale_w": ones(1, 2 * N)[:, ::2]}, "scale_w.float().contiguous()"),
    (NAMES, {"scale_x": BY_ROW, "scale_w": BY_COLUMN.clone().requires_grad_()}, "detached"),
    (NAMES, {"scale_x": ONE, "scale_w": ONE, "out_dtype": FP8}, "out_dtype"),
    (NAMES, {"scale_x": ONE, "scale_w": ONE, "bias": BIAS}, "[48] of torch.bfloat16"),
    (NAMES, {"scale_x": ONE, "scale_w": ONE, "w": W8.contiguous()}, "Store the weight as [n, k]"),
    (NAMES, {"scale_x": ONE, "scale_w": ONE, "x": X8[:, :24].contiguous(), "w": ones(N, 24).to(FP8).t()}, "k=24"),
    (NAMES, {"scale_x": ONE, "scale_w": ONE, "w": ones(24, K).to(FP8).t()}, "n=24"),
    (NAMES, {"scale_x": ONE, "scale_w": ONE, "x": X.bfloat16(), "w": W.bfloat16()}, "leave the scales out"),
    (NAMES, {"x": X.bfloat16(), "w": W.bfloat16(), "out_dtype": torch.float32}, "cast y"),
    (NAMES, {"scale_x": ONE, "scale_w": ONE, "x": X.to(torch.float8_e5m2), "w": W8.to(torch.float8_e5m2)}, "e4m3fn"),
    ((RS, AR), {"gate": W8}, "gate=: it takes no such keyword"),  # whatever its shape
    ((AG,), {"gate": W8, "scale_x": ONE, "scale_w": ONE}, "got (1,) and (1,)"),
    ((AG,), {"gate": W8, "scale_x": ONE, "scale_w": ones(1, 2 * N)}, "two of scale_w, w's and the gate's"),
    ((AG,), {"gate": W8, "scale_x": TWO, "scale_w": TWO}, "got (2,) and (2,)"),
    ((AG,), {"gate": W8, "scale_x": ONE, "scale_w": TWO[:, None]}, "got (1,) and (2, 1)"),
    ((AG,), {"gate": W8, "scale_x": BY_ROW, "scale_w": BY_COLUMN}, "(1, 96) for the columns of w and, behind them, of"),
    ((AG,), {"gate": W8, "scale_x": ONE, "scale_w": TWO, "bias": BIAS.bfloat16()}, "a bias beside a gate"),
    ((AG,), {"gate": W.bfloat16(), "scale_x": ONE, "scale_w": TWO}, "Pass [32, 48] of torch.float8_e4m3fn"),
    ((AG,), {"gate": ones(16, K).to(FP8).t(), "scale_x": ONE, "scale_w": TWO}, "gate: got [32, 16]"),
    ((AG,), {"gate": W8.contiguous(), "scale_x": ONE, "scale_w": TWO}, "in the memory layout of w"),
)


def not_refused() -> list[str]:
    """For `run_ranks`: what is taken, or refused with other words; and whether a right call follows well."""
    wrong = []
    for x, w, table in ((X, W, PLAIN), (X8, W8, IN_FP8)):
        for operators, given, word in table:
            for name in operators:
                try:
                    getattr(ow, name)(**{"x" if name != AG else "x_shard": x, "w": w} | renamed(name, given))
                    wrong.append(f"{name} {word}: nothing raised")
                except InputError as error:
                    wrong += [] if word in str(error) else [f"{name} {word}: {error}"]
    right = ow.matmul_all_reduce(X, W)
    return wrong if bool((right == K * dist.get_world_size()).all()) else [*wrong, "wrong afterwards"]


def renamed(name: str, given: Given) -> Given:
    return {("x_shard" if (name, key) == (AG, "x") else key): value for key, value in given.items()}


def test_what_is_refused_is_a_typed_error_on_every_rank():
    assert run_ranks(not_refused, 2) == [[], []]


# Calls that each rank makes in its own way, each right alone; and what the others are told.
DIFFERING: tuple[tuple[Callable[[int], object], str], ...] = (
    (lambda rank: ow.all_gather_matmul(X, W, activation="silu" if rank else None), ""),
    (lambda rank: ow.matmul_all_reduce(X, W, norm=ow.RmsNorm(BIAS, eps=1e-5 if rank else 1e-6)), ""),
    (lambda rank: ow.all_gather_matmul(X, [ones(K, cols) for cols in ((8, 16) if rank else (16, 8))]), "n=8+16"),
    (lambda rank: ow.all_gather_matmul(X, [ones(K, cols) for cols in ((8, 16) if rank else (16, 8))]), "n=16+8"),
    (
        lambda rank: ow.all_gather_matmul(X8, W8, scale_x=BY_ROW if rank else ONE, scale_w=BY_COLUMN if rank else ONE),
        "",
    ),
)


def told_of_differences() -> list[str]:
    found = []
    for call, _ in DIFFERING:
        try:
            call(dist.get_rank())
            found.append("nothing raised")
        except OverweaveError as error:
            found.append(f"{type(error).__name__} {error}")
        ow.reset()
    return found


def test_ranks_agree_on_what_follows_a_product():
    for told in run_ranks(told_of_differences, 2):
        for text, (_, word) in zip(told, DIFFERING, strict=True):
            assert text.startswith("RankMismatch")
            assert word in text


@pytest.mark.parametrize("name", NAMES)
def test_a_signature_has_the_keywords_of_the_record(name: str):
    _, _, group, *keywords, others = inspect.signature(getattr(ow, name)).parameters.values()
    assert tuple(each.name for each in keywords) == operator_of(name).keywords
    assert {each.kind for each in keywords} == {inspect.Parameter.KEYWORD_ONLY}
    assert (group.name, others.kind) == ("group", inspect.Parameter.VAR_KEYWORD)


def what_unknown_keywords_get() -> dict[str, list[str]]:
    """Of every operator: what it says of a keyword that it has not, behind a call that prepared the signature."""
    told: dict[str, list[str]] = {}
    for name in NAMES:
        call: Any = getattr(ow, name)
        call(X, W)
        for keyword in ("extras", "gate", "norm", "biass", "m"):
            if keyword not in operator_of(name).keywords:
                with pytest.raises(InputError) as raised:
                    call(X, W, **{keyword: None})
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


@pytest.mark.parametrize("name", ["all_gather_matmul.push", "matmul_reduce_scatter.scatter"])
def test_plans_of_fp8_are_scaled(name: str):
    shape = {"m": 8, "n": 16, "k": 16, "world_size": 2, "dtype": "float8_e4m3fn", "b_is_transposed": True}
    with pytest.raises(InputError, match="scaled"):
        build(name, Problem(operator=name.partition(".")[0], **shape), {})
