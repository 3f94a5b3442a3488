"""`all_gather_matmul` of fp8 with a gate, on CPU ranks: both weights have their own scales; floats; bad arguments."""

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
from tests.ops.call.test_scales import FP8, PLANS
from tests.ranks import run_ranks

N, K = 48, 32


class Data:
    """Integers that fp8 holds, and powers of two as scales, the gate's behind those of w: every product is exact."""

    def __init__(self, m: int, by_rows: bool, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(100 * seed + m)
        whole, w, gate = (torch.randint(-2, 3, (rows, K), generator=generator).to(FP8) for rows in (m, N, N))
        own = slice(*shard_rows(m, dist.get_world_size(), dist.get_rank()))
        powers = 2.0 ** torch.randint(-2, 3, (m, 1), generator=generator)
        self.m, self.x, self.w, self.gate = m, whole[own], w.t(), gate.t()
        self.scale_x = powers[own].contiguous() if by_rows else torch.tensor([0.5])
        columns = 2.0 ** torch.randint(-2, 3, (1, 2 * N), generator=generator)
        self.scale_w = columns if by_rows else torch.tensor([4.0, 0.25])
        self.residual = torch.randint(-2, 3, (m, N), generator=generator).float()
        by_row, of_w, of_gate = powers if by_rows else 0.5, *self.scale_w.reshape(1, -1).chunk(2, dim=1)
        wide = whole.float()
        self.exact = (wide @ w.float().t() * by_row * of_w) * (wide @ gate.float().t() * by_row * of_gate)

    def product(self, plan: str | None, **more: object) -> torch.Tensor:
        given: dict[str, Any] = {"scale_x": self.scale_x, "scale_w": self.scale_w, "gate": self.gate, **more}  # type: ignore[arg-type]
        return ow.all_gather_matmul(self.x, self.w, m=self.m, **given, plan=plan)


def wrong_gates(rows: tuple[int, ...], plans: tuple[str | None, ...]) -> list[str]:
    """Each call twice, with other tensors."""
    wrong = []
    for m, by_rows, out, plan in product(rows, (True, False), (torch.float32, torch.bfloat16), plans):
        for turn in range(2):
            data = Data(m, by_rows, turn)
            added = data.residual.to(out) if turn else None
            y = data.product(plan, out_dtype=out, residual=added)
            exact = data.exact if added is None else data.exact + data.residual
            # In 16 bits a library rounds each product and what it makes of them.
            tolerance = 0.0 if out == torch.float32 else 2**-6
            if y.dtype != out or not torch.allclose(y.float(), exact, rtol=tolerance, atol=tolerance):
                wrong.append(f"m={m} by_rows={by_rows} {out} {plan} turn {turn}")
    return wrong


def test_a_gate_has_scales_of_its_own():
    assert run_ranks(wrong_gates, 2, (21,), (None, "per_shard", "push pieces=2")) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_plan_and_any_number_of_rows(world_size: int):
    assert run_ranks(wrong_gates, world_size, (0, 1, 3, 37), PLANS, timeout_s=120) == [[]] * world_size


def errors_of_floats() -> list[float]:
    """Of SwiGLU, relative to fp64 on the same fp8 numbers, by plan."""
    torch.manual_seed(dist.get_rank())
    x, w, gate = (torch.randn(rows, 64).to(FP8) for rows in (24, N, N))
    scale_x, scale_w = torch.rand(24, 1) / 4, torch.rand(1, 2 * N) / 2
    exact = reference.all_gather_scaled_gated_matmul(
        x.double(), (w.t().double(), gate.t().double()), scale_x.double(), scale_w.double(), activation="silu"
    )
    errors = []
    for plan in ("sequential", "push"):
        given: dict[str, Any] = {"activation": "silu", "gate": gate.t(), "scale_x": scale_x, "scale_w": scale_w}
        y = ow.all_gather_matmul(x, w.t(), **given, plan=plan)
        errors.append(float((y.double() - exact).norm() / exact.norm()))
    return errors


def test_floats_against_fp64():
    assert all(error < 2**-7 for errors in run_ranks(errors_of_floats, 2) for error in errors)


BOTH = torch.ones(1, 2 * N)
ROWS, ONE, TWO = torch.ones(4, 1), torch.ones(1), torch.ones(2)
BAD = {
    "got (1,) and (1,)": {"scale_x": ONE, "scale_w": ONE},
    "two of scale_w, w's and the gate's": {"scale_x": ONE, "scale_w": BOTH},
    "got (2,) and (2,)": {"scale_x": TWO, "scale_w": TWO},
    "got (1,) and (2, 1)": {"scale_x": ONE, "scale_w": TWO[:, None]},
    "(1, 96) for the columns of w and, behind them, of the gate": {"scale_x": ROWS, "scale_w": torch.ones(1, N)},
    "scale_w of fp8 operands: got None": {"scale_x": ONE},
    "a bias beside a gate": {"scale_x": ONE, "scale_w": TWO, "bias": torch.ones(N).bfloat16()},
    "Pass [32, 48] of torch.float8_e4m3fn": {"scale_x": ONE, "scale_w": TWO, "gate": torch.ones(N, K).bfloat16().t()},
    "gate: got [32, 16]": {"scale_x": ONE, "scale_w": TWO, "gate": torch.ones(16, K).to(FP8).t()},
    "in the memory layout of w": {"scale_x": ONE, "scale_w": TWO, "gate": torch.ones(K, N).to(FP8)},
}


def errors_of_bad_scales() -> list[str]:
    x, w = torch.ones(4, K).to(FP8), torch.ones(N, K).to(FP8).t()
    found = []
    for extras in BAD.values():
        try:
            ow.all_gather_matmul(x, w, **{"gate": w, **extras})
            found.append("nothing raised")
        except OverweaveError as error:
            found.append(f"{type(error).__name__} {error}")
    return found


def test_bad_arguments_are_typed_errors_on_every_rank():
    for of_rank in run_ranks(errors_of_bad_scales, 2):
        assert all(found.startswith("InputError") for found in of_rank), of_rank
        assert all(word in found for word, found in zip(BAD, of_rank, strict=True)), of_rank


def test_it_is_explained():
    taken = ow.explain("all_gather_matmul", m=2048, n=2048, k=2048, world_size=2, dtype=FP8, after="gate+silu")
    assert taken.source in ("model", "rule", "shipped", "nearest")
    assert "scaled by rows+silu+gate" in str(taken)


def tuned() -> list[object]:
    """What tuning takes, measured by ranks, and what calls then do."""
    taken = ow.tune("all_gather_matmul", m=64, n=N, k=K, dtype=FP8, after="gate")
    told = ow.explain("all_gather_matmul", m=64, n=N, k=K, world_size=2, dtype=FP8, after="gate", device="cpu")
    data = Data(64, by_rows=True)
    return [taken.source, told.text == taken.text, torch.equal(data.product(None, out_dtype=torch.float32), data.exact)]


@pytest.mark.slow
def test_it_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path))
    assert run_ranks(tuned, 2) == [["cache", True, True]] * 2
