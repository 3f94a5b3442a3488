"""fp8 products summed over CPU ranks: every plan exact on integers, floats beside plain torch, bad arguments."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from overweave.errors import OverweaveError
from overweave.ir.shards import shard_rows
from tests.ops import reference
from tests.ranks import run_ranks

FP8 = torch.float8_e4m3fn
SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
PLANS = {
    SCATTER: (
        None,
        "sequential",
        "per_shard",
        "fused_ring pieces=2",
        "scatter pieces=2 own_pieces=2",
        "scatter pieces=2 sums=epilogue",
        "scatter mover=copy_kernel copy_programs=2",
        "scatter_pull pieces=2 own_pieces=2",
        "scatter_stored pieces=2",
        "ring_stored pieces=2",
    ),
    REDUCE: (
        None,
        "sequential",
        "one_shot_packed",
        "two_shot_packed",
        "two_shot pieces=2",
        "ring_stored pieces=2",
    ),
}
N, K = 48, 32


class Data:
    """Small integers, and powers of two as scales, each rank's own: every sum of partials is exact in 16 bits."""

    def __init__(self, m: int, by_rows: bool) -> None:
        generator = torch.Generator().manual_seed(m + 1000 * dist.get_rank())
        self.x = torch.randint(-1, 2, (m, K), generator=generator).float().to(FP8)
        self.w = torch.randint(-1, 2, (N, K), generator=generator).float().to(FP8).t()
        rows, columns = ((m, 1), (1, N)) if by_rows else ((1,), ())
        self.scale_x = 2.0 ** torch.randint(0, 2, rows, generator=generator)
        self.scale_w = 2.0 ** torch.randint(-1, 1, columns, generator=generator)

    def exact(self, operator: str) -> torch.Tensor:
        total = reference.scaled_matmul_all_reduce(self.x, self.w, self.scale_x, self.scale_w)
        own = shard_rows(len(self.x), dist.get_world_size(), dist.get_rank())
        return total[slice(*own)] if operator == SCATTER else total

    def run(self, operator: str, plan: str | None, out: torch.dtype | None) -> torch.Tensor:
        given: dict[str, Any] = {"scale_x": self.scale_x, "scale_w": self.scale_w, "out_dtype": out}
        y: torch.Tensor = getattr(ow, operator)(self.x, self.w, **given, plan=plan)
        return y


def wrong_plans(operator: str, rows: tuple[int, ...], outs: tuple[torch.dtype | None, ...]) -> list[str]:
    wrong = []
    for m, by_rows, out, plan in product(rows, (True, False), outs, PLANS[operator]):
        data = Data(m, by_rows)
        y, exact = data.run(operator, plan, out), data.exact(operator)
        if y.dtype != (out or torch.bfloat16) or not torch.equal(y, exact.to(y.dtype)):
            wrong.append(f"m={m} by_rows={by_rows} {out} {plan}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("operator", PLANS)
def test_every_plan_is_exact_on_integers(operator: str):
    assert run_ranks(wrong_plans, 2, operator, (21,), (None, torch.float16, torch.float32)) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "world_size"), [*product(PLANS, (1, 3, 4))])
def test_any_number_of_rows(operator: str, world_size: int):
    assert run_ranks(wrong_plans, world_size, operator, (0, 1, 3, 37), (None,)) == [[]] * world_size


def errors_of_floats(operator: str) -> list[list[float]]:
    """Relative to fp64 on the same fp8 numbers: of each plan, and of plain torch, which adds partials in bf16."""
    torch.manual_seed(dist.get_rank())
    x, w = torch.randn(24, 64).to(FP8), torch.randn(N, 64).to(FP8).t()
    scale_x, scale_w = torch.rand(24, 1) + 0.5, torch.rand(1, N) + 0.5
    exact = reference.scaled_matmul_all_reduce(x.double(), w.double(), scale_x.double(), scale_w.double())
    torchs = ((x.float() @ w.float()) * scale_x * scale_w).bfloat16()
    dist.all_reduce(torchs)
    own = slice(*shard_rows(24, dist.get_world_size(), dist.get_rank())) if operator == SCATTER else slice(None)
    given: dict[str, Any] = {"scale_x": scale_x, "scale_w": scale_w}

    def error(y: torch.Tensor) -> float:
        return float((y.double() - exact[own]).norm() / exact[own].norm())

    plans = (plan for plan in PLANS[operator] if plan is not None)
    ours = [error(getattr(ow, operator)(x, w, **given, plan=plan)) for plan in plans]
    return [ours, [error(torchs[own])]]


@pytest.mark.slow
@pytest.mark.parametrize("operator", PLANS)
def test_no_plan_is_further_from_the_truth_than_plain_torch(operator: str):
    for ours, (torchs,) in run_ranks(errors_of_floats, 4, operator):
        assert max(ours) <= 1.05 * torchs < 2**-7


def normed_sums(plans: tuple[str, ...]) -> list[str]:
    """A norm's tensors, z and the result are of the dtype of the sum."""
    data, wrong = Data(21, by_rows=True), []
    exact = data.exact(REDUCE)
    weight, residual = torch.ones(N, dtype=torch.float16), torch.ones(21, N, dtype=torch.float16)
    given: dict[str, Any] = {"scale_x": data.scale_x, "scale_w": data.scale_w, "out_dtype": torch.float16}
    for plan in plans:
        norm = ow.RmsNorm(weight, residual)
        normed, z = ow.matmul_all_reduce(data.x, data.w, **given, norm=norm, plan=plan)
        expected = (exact.half() + residual).half()
        if not torch.equal(z, expected) or (normed - torch.nn.functional.rms_norm(z, (N,), weight)).abs().max() > 0.01:
            wrong.append(plan)
    return wrong


def test_sums_of_fp8_end_with_a_norm():
    plans = ("sequential", "one_shot_packed", "two_shot sums=epilogue", "two_shot_packed")
    assert run_ranks(normed_sums, 2, plans) == [[]] * 2


def moved_scales(operator: str) -> bool:
    """Each call of a signature reads its own scales."""
    data, ys = Data(8, by_rows=True), []
    for by in (1.0, 2.0, 4.0):
        given: dict[str, Any] = {"scale_x": data.scale_x * by, "scale_w": data.scale_w}
        ys.append(getattr(ow, operator)(data.x, data.w, **given))
    return torch.equal(ys[0] * 2, ys[1]) and torch.equal(ys[0] * 4, ys[2])


@pytest.mark.parametrize("operator", PLANS)
def test_each_call_reads_its_own_scales(operator: str):
    assert run_ranks(moved_scales, 2, operator) == [True, True]


def errors_of_bad_arguments(operator: str) -> list[str]:
    x, w = torch.ones(4, K).to(FP8), torch.ones(N, K).to(FP8).t()
    rows, columns, one = torch.ones(4, 1), torch.ones(1, N), torch.ones(1)
    bias, found = torch.ones(N, dtype=torch.bfloat16), []
    for operands, extras in (
        ((x, w), None),
        ((x, w), {"scale_x": torch.ones(2, 1), "scale_w": columns}),
        ((x, w), {"scale_x": rows, "scale_w": columns.double()}),
        ((x, w), {"scale_x": one, "scale_w": one, "out_dtype": FP8}),
        ((x, w.contiguous()), {"scale_x": one, "scale_w": one}),
        ((x[:, :24].contiguous(), torch.ones(N, 24).to(FP8).t()), {"scale_x": one, "scale_w": one}),
        ((x.bfloat16(), w.bfloat16()), {"scale_x": one, "scale_w": one}),
        ((x, w), {"scale_x": one, "scale_w": one, "bias": bias.float()}),  # not in the dtype of the result
        ((x.bfloat16(), w.bfloat16()), {"gate": bias}),  # refused as such, whatever its shape
    ):
        try:
            getattr(ow, operator)(*operands, **(extras or {}))
            found.append("nothing raised")
        except OverweaveError as error:
            found.append(f"{type(error).__name__} {error}")
    return found


WORDS = (
    "scale_x of fp8 operands",
    "(4, 1) for the own rows",
    "float64",
    "out_dtype",
    "Store the weight as [n, k]",
    "k=24",
    "leave the scales out",
    "Pass [48] of torch.bfloat16",
    "gate=: it takes no such keyword",
)


@pytest.mark.parametrize("operator", PLANS)
def test_bad_arguments_are_typed_errors_on_every_rank(operator: str):
    for of_rank in run_ranks(errors_of_bad_arguments, 2, operator):
        assert all(found.startswith("InputError") for found in of_rank), of_rank
        assert all(word in found for word, found in zip(WORDS, of_rank, strict=True)), of_rank


def tuned(operator: str) -> list[object]:
    """What tuning takes, measured by ranks, and what calls then do."""
    taken = ow.tune(operator, m=64, n=N, k=K, dtype=FP8)
    told = ow.explain(operator, m=64, n=N, k=K, world_size=2, dtype=FP8, device="cpu")
    data = Data(64, by_rows=True)
    y = data.run(operator, None, None)
    return [taken.source, told.text == taken.text, torch.equal(y, data.exact(operator).bfloat16())]


@pytest.mark.slow
@pytest.mark.parametrize("operator", PLANS)
def test_fp8_is_tuned(operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path))
    assert run_ranks(tuned, 2, operator) == [["cache", True, True]] * 2
