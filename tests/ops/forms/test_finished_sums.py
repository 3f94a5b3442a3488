"""Bias, activation and residual behind summed results on CPU ranks: every plan against plain torch; bad arguments."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from overweave.errors import OverweaveError
from overweave.ir.shards import shard_rows
from tests.ops import reference
from tests.ranks import run_ranks

SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
OPERATORS = {SCATTER: ow.matmul_reduce_scatter, REDUCE: ow.matmul_all_reduce}
REFERENCES = {SCATTER: reference.matmul_reduce_scatter, REDUCE: reference.matmul_all_reduce}
PLANS: dict[str, tuple[str | None, ...]] = {
    SCATTER: (
        None,
        "sequential",
        "per_shard",
        "scatter_packed",
        "scatter pieces=2",
        "scatter own_pieces=2",
        "scatter mover=copy_kernel",
        "scatter sums=epilogue pieces=2",
        "fused_ring pieces=2",
        "remote_add",
        "scatter_pull pieces=2",
        "scatter_stored pieces=2",
        "ring_stored pieces=2",
    ),
    REDUCE: (
        None,
        "sequential",
        "one_shot_packed",
        "two_shot_packed",
        "two_shot pieces=2",
        "two_shot pieces=2 sums=epilogue",
        "ring_stored pieces=2",
    ),
}
N, K = 24, 16
ENDINGS = ((True, None, True), (False, "silu", False), (True, "gelu", False), (True, "gelu_tanh", True))


def rows_of(operator: str, m: int) -> int:
    lo, hi = shard_rows(m, dist.get_world_size(), dist.get_rank())
    return hi - lo if operator == SCATTER else m


def beside(operator: str, m: int, like: torch.dtype, has: tuple[bool, str | None, bool]) -> dict[str, object]:
    """Integers: bias and, of an all-reduce, residual the same on every rank."""
    torch.manual_seed(m if operator == REDUCE else m + dist.get_rank())
    residual = torch.randint(-8, 9, (rows_of(operator, m), N)).to(like)
    torch.manual_seed(m)
    bias = torch.randint(-8, 9, (N,)).to(like)
    return {"bias": bias if has[0] else None, "activation": has[1], "residual": residual if has[2] else None}


def operands(m: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1000 * m + dist.get_rank())
    return torch.randint(-1, 2, (m, K)).to(dtype), torch.randint(-1, 2, (K, N)).to(dtype)


Case = tuple[int, torch.dtype, tuple[bool, str | None, bool]]


def wrong_sums(cases: tuple[Case, ...]) -> list[str]:
    """What is not plain torch's: without an activation every bit of it, with one up to a rounding of fp64's."""
    wrong = []
    for operator, (m, dtype, has) in product(OPERATORS, cases):
        (x, w), extras = operands(m, dtype), beside(operator, m, dtype, has)
        wide = {name: one.double() if isinstance(one, torch.Tensor) else one for name, one in extras.items()}
        exact = REFERENCES[operator](x.double(), w.double(), **wide)
        for plan in PLANS[operator]:
            y = OPERATORS[operator](x, w, **extras, plan=plan)
            roundings = 2 if plan == "sequential" and dtype == torch.bfloat16 else 1
            near = roundings * (2**-8 if dtype == torch.bfloat16 else 2**-20)
            is_near = torch.allclose(y.double(), exact, near, near)
            if not (is_near if has[1] else torch.equal(y, exact.to(dtype))) or y.shape != (rows_of(operator, m), N):
                wrong.append(f"{operator} {plan} m={m} {dtype} {has}")
    return wrong


@pytest.mark.slow
def test_three_ranks_finish_their_sums():
    assert run_ranks(wrong_sums, 3, ((7, torch.bfloat16, ENDINGS[0]), (7, torch.float32, ENDINGS[3]))) == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_plan_does_what_plain_torch_does(world_size: int):
    """With no rows, one, fewer than ranks, and a number that none but one divides."""
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)
    cases = tuple(zip((0, 1, world_size - 1, 37), dtypes, ENDINGS, strict=True))
    cases = cases[1:3] if world_size == 8 else cases
    assert run_ranks(wrong_sums, world_size, cases, timeout_s=200) == [[]] * world_size


def disagreements() -> list[str]:
    """Of floats: every rank of an all-reduce has the same bits, also where each brings a residual of its own."""
    wrong, ranks = [], dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    x, w, residual = torch.randn(11, K).bfloat16(), torch.randn(K, N).bfloat16(), torch.randn(11, N).bfloat16()
    dist.broadcast(residual, 0)
    for plan in PLANS[REDUCE]:
        y = ow.matmul_all_reduce(x, w, activation="gelu", residual=residual, plan=plan)
        everybodys = [torch.empty_like(y) for _ in range(ranks)]
        dist.all_gather(everybodys, y)
        if not all(torch.equal(y, other) for other in everybodys):
            wrong.append(str(plan))
    return wrong


def test_every_rank_has_the_same_bits():
    assert run_ranks(disagreements, 3) == [[]] * 3


def errors_of_bad_extras() -> list[str]:
    x, w, found = torch.ones(4, K), torch.ones(K, N), []
    norm = ow.RmsNorm(torch.ones(N))
    calls: tuple[tuple[str, dict[str, Any]], ...] = (
        (SCATTER, {"bias": torch.ones(N + 1)}),
        (SCATTER, {"residual": torch.ones(4, N)}),  # of all rows, not the own ones
        (REDUCE, {"residual": torch.ones(2, N)}),
        (REDUCE, {"activation": "relu"}),
        (SCATTER, {"gate": torch.ones(K, N)}),
        (REDUCE, {"bias": torch.ones(N), "norm": norm}),
        (REDUCE, {"bias": torch.ones(N), "plan": "torch.two_shot"}),
    )
    for operator, given in calls:
        try:
            OPERATORS[operator](x, w, **given)
            found.append("nothing raised")
        except OverweaveError as error:
            found.append(f"{type(error).__name__} {error}")
    return found


def test_bad_arguments_are_typed_errors_on_every_rank():
    words = ("bias", "[2, 24]", "[4, 24]", "silu, gelu, gelu_tanh", "gate", "beside a norm", "")
    for of_rank in run_ranks(errors_of_bad_extras, 2):
        assert all(found.startswith("InputError") for found in of_rank), of_rank
        assert all(word in found for word, found in zip(words, of_rank, strict=True)), of_rank
