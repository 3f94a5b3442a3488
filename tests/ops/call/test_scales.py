"""fp8 operands and their scales on CPU ranks: every plan exact on integers, floats against fp64, bad arguments."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from overweave.errors import InputError, OverweaveError
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from tests.ops import reference
from tests.ranks import run_ranks

FP8 = torch.float8_e4m3fn
PLANS = (
    None,
    "sequential",
    "per_shard",
    "push pieces=2",
    "push mover=copy_kernel copy_programs=2",
    "pull",
)
N, K = 48, 32


class Data:
    """Integers that fp8 holds, and powers of two as scales: every product and every sum is exact."""

    def __init__(self, m: int, by_rows: bool) -> None:
        generator = torch.Generator().manual_seed(m)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        whole = torch.randint(-2, 3, (m, K), generator=generator).float()
        self.w = torch.randint(-2, 3, (N, K), generator=generator).float().to(FP8).t()
        powers = 2.0 ** torch.randint(-2, 3, (m, 1), generator=generator)
        size = -(-m // ranks)
        own = slice(min(rank * size, m), min((rank + 1) * size, m))
        self.m, self.x, self.gathered = m, whole[own].to(FP8), whole
        self.scale_x = powers[own].contiguous() if by_rows else torch.tensor([0.5])
        self.scale_w = 2.0 ** torch.randint(-2, 3, (1, N), generator=generator) if by_rows else torch.tensor(4.0)
        self.exact = (whole @ self.w.float()) * (powers * self.scale_w if by_rows else 2.0)


def wrong_plans(rows: tuple[int, ...]) -> list[str]:
    wrong = []
    for m, by_rows, out, plan in product(rows, (True, False), (None, torch.float32, torch.float16), PLANS):
        data = Data(m, by_rows)
        given: dict[str, Any] = {"scale_x": data.scale_x, "scale_w": data.scale_w, "out_dtype": out}
        y, gathered = ow.all_gather_matmul(data.x, data.w, m=m, **given, return_gathered=True, plan=plan)
        is_right = torch.equal(y, data.exact.to(out or torch.bfloat16)) and y.dtype == (out or torch.bfloat16)
        if not is_right or not torch.equal(gathered.float(), data.gathered):
            wrong.append(f"m={m} by_rows={by_rows} {out} {plan}")
    return wrong


@pytest.mark.slow
def test_every_plan_is_exact_on_integers():
    assert run_ranks(wrong_plans, 2, (21,)) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_number_of_rows(world_size: int):
    assert run_ranks(wrong_plans, world_size, (0, 1, 3, 37, 64)) == [[]] * world_size


def errors_of_floats() -> list[float]:
    """Relative to fp64 on the same fp8 numbers, with a bias, by plan; a bf16 result is rounded once, or twice."""
    torch.manual_seed(dist.get_rank())
    x, w = torch.randn(24, 64).to(FP8), torch.randn(N, 64).to(FP8).t()
    scale_x, scale_w, bias = torch.rand(24, 1) + 0.5, torch.rand(1, N) + 0.5, torch.randn(N).bfloat16()
    exact = reference.all_gather_scaled_matmul(x.double(), w.double(), scale_x.double(), scale_w.double())
    exact += bias.double()
    errors = []
    for plan in ("sequential", "push"):
        given: dict[str, Any] = {"bias": bias, "scale_x": scale_x, "scale_w": scale_w}
        y = ow.all_gather_matmul(x, w, **given, plan=plan)
        errors.append(float((y.double() - exact).norm() / exact.norm()))
    return errors


def test_floats_against_fp64():
    assert all(error < 2**-8 for errors in run_ranks(errors_of_floats, 2) for error in errors)


def moved_scales() -> bool:
    """The second call of a signature reads its own scales, and its peers' new ones."""
    data = Data(8, by_rows=True)
    ys = []
    for by in (1.0, 2.0, 4.0):
        given: dict[str, Any] = {"scale_x": data.scale_x * by, "scale_w": data.scale_w}
        ys.append(ow.all_gather_matmul(data.x, data.w, **given))
    return torch.equal(ys[0] * 2, ys[1]) and torch.equal(ys[0] * 4, ys[2])


def test_each_call_reads_its_own_scales():
    assert run_ranks(moved_scales, 2) == [True, True]


def errors_of_bad_scales() -> list[str]:
    x, w = torch.ones(4, K).to(FP8), torch.ones(N, K).to(FP8).t()
    rows, columns, one = torch.ones(4, 1), torch.ones(1, N), torch.ones(1)
    found = []
    for operands, extras in (
        ((x, w), None),
        ((x, w), {"scale_x": one}),
        ((x, w), {"scale_x": one, "scale_w": columns}),
        ((x, w), {"scale_x": torch.ones(8, 1), "scale_w": columns}),
        ((x, w), {"scale_x": rows, "scale_w": columns.double()}),
        ((x, w), {"scale_x": rows, "scale_w": torch.ones(1, 2 * N)[:, ::2]}),
        ((x, w), {"scale_x": rows, "scale_w": columns.clone().requires_grad_()}),
        ((x, w), {"scale_x": one, "scale_w": one, "out_dtype": torch.float8_e4m3fn}),
        ((x, w), {"scale_x": one, "scale_w": one, "bias": torch.ones(N)}),
        ((x, w.contiguous()), {"scale_x": one, "scale_w": one}),
        ((x[:, :24].contiguous(), torch.ones(N, 24).to(FP8).t()), {"scale_x": one, "scale_w": one}),
        ((x, torch.ones(24, K).to(FP8).t()), {"scale_x": one, "scale_w": one}),
        ((x.bfloat16(), w.bfloat16()), {"scale_x": one, "scale_w": one}),
        ((x.bfloat16(), w.bfloat16()), {"out_dtype": torch.float32}),
        ((x.to(torch.float8_e5m2), w.to(torch.float8_e5m2)), {"scale_x": one, "scale_w": one}),
    ):
        try:
            ow.all_gather_matmul(*operands, **(extras or {}))
            found.append("nothing raised")
        except OverweaveError as error:
            found.append(f"{type(error).__name__} {error}")
    return found


WORDS = (
    "scale_x of fp8 operands",
    "scale_w of fp8 operands: got None",
    "Pass one element each",
    "(4, 1) for the own rows",
    "float64",
    "scale_w.float().contiguous()",
    "detached",
    "out_dtype",
    "of torch.bfloat16",
    "Store the weight as [n, k]",
    "k=24",
    "n=24",
    "leave the scales out",
    "cast y",
    "float8_e4m3fn",
)


def test_bad_arguments_are_typed_errors_on_every_rank():
    for of_rank in run_ranks(errors_of_bad_scales, 2):
        assert all(found.startswith("InputError") for found in of_rank), of_rank
        assert all(word in found for word, found in zip(WORDS, of_rank, strict=True)), of_rank


def disagree() -> str:
    data = Data(8, by_rows=bool(dist.get_rank()))
    try:
        ow.all_gather_matmul(data.x, data.w, scale_x=data.scale_x, scale_w=data.scale_w)
    except OverweaveError as error:
        return type(error).__name__
    return "nothing raised"


def test_ranks_agree_on_the_scaling():
    assert run_ranks(disagree, 2) == ["RankMismatch"] * 2


def test_plans_of_fp8_are_scaled():
    shape = {"m": 8, "n": 16, "k": 16, "world_size": 2, "dtype": "float8_e4m3fn", "b_is_transposed": True}
    with pytest.raises(InputError, match="scaled"):
        build("all_gather_matmul.push", Problem(operator="all_gather_matmul", **shape), {})
    with pytest.raises(InputError, match="scaled"):
        build("matmul_reduce_scatter.scatter", Problem(operator="matmul_reduce_scatter", **shape), {})


def tuned() -> list[object]:
    """What tuning takes, measured by ranks, and what calls then do."""
    taken = ow.tune("all_gather_matmul", m=64, n=N, k=K, dtype=FP8)
    told = ow.explain("all_gather_matmul", m=64, n=N, k=K, world_size=2, dtype=FP8, device="cpu")
    data = Data(64, by_rows=True)
    y = ow.all_gather_matmul(data.x, data.w, scale_x=data.scale_x, scale_w=data.scale_w)
    return [taken.source, told.text == taken.text, torch.equal(y, data.exact.bfloat16())]


@pytest.mark.slow
def test_fp8_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path))
    assert run_ranks(tuned, 2) == [["cache", True, True]] * 2


@pytest.mark.slow
def test_fp8_is_explained():
    for operator in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        taken = ow.explain(operator, m=2048, n=2048, k=2048, world_size=2, dtype=FP8)
        assert taken.source == "model"
        assert "not: torch's" in str(taken)
        with pytest.raises(InputError, match="k=24"):
            ow.explain(operator, m=64, n=N, k=24, world_size=2, dtype=FP8)
