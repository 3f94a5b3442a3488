"""The sum of several products: what is laid side by side, and where the factors stay where they lie."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

import overweave as ow
from overweave.errors import InputError
from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import W_REST, X_REST
from overweave.ir.problem import Problem
from overweave.runtime.library.two_parts import in_two_parts, takes_parts, whole
from overweave.schedules.catalog.catalog import build
from tests.ranks import run_ranks

ROWS, COLS, DEPTHS = 5, 24, (16, 40, 8)


def pairs(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(len(DEPTHS))
    xs = [torch.randn(ROWS, k, generator=generator).to(dtype) for k in DEPTHS]
    return xs, [torch.randn(k, COLS, generator=generator).to(dtype) for k in DEPTHS]


def sums_alone() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        xs, ws = pairs(dtype)
        exact = torch.stack([x.double() @ w.double() for x, w in zip(xs, ws, strict=True)]).sum(0)
        with patch.object(torch, "cat", wraps=torch.cat) as joins:
            y = ow.matmul_reduce_scatter(xs, ws)
            assert not joins.called
            beside = ow.matmul_reduce_scatter(xs, ws, plan="sequential")
            assert joins.called
        assert y.dtype == dtype
        # A sum of fp32, rounded once: half of the last bit, but for what fp32 itself lost.
        allowed = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-4
        assert ((y.double() - exact).abs() <= allowed).all()
        assert torch.allclose(y, beside, rtol=torch.finfo(dtype).eps, atol=1e-4)
        bias = torch.ones(COLS, dtype=dtype)
        assert torch.allclose(ow.matmul_reduce_scatter(xs, ws, bias=bias), y + 1, rtol=0.02, atol=0.02)
    empty = ow.matmul_reduce_scatter([x[:0] for x in xs], ws)
    assert empty.shape == (0, COLS)
    for wrong in ([ws[0], ws[1]], [ws[0], ws[1], ws[2][:, :8].contiguous()]):
        with pytest.raises(InputError, match=r"lists of one length|one shape"):
            ow.matmul_reduce_scatter(xs, wrong)


def test_in_a_group_of_one_no_factor_is_copied():
    run_ranks(sums_alone, 1)


def factors(*depths: int, dtype: torch.dtype = torch.bfloat16) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Whole numbers, whose sums are exact."""
    xs = [torch.randint(-1, 2, (ROWS, k)).to(dtype) for k in depths]
    return xs, [torch.randint(-1, 2, (k, COLS)).to(dtype) for k in depths]


@pytest.mark.parametrize("depths", [(40, 256, 72), (128, 128), (256,), (100, 60)])
@pytest.mark.parametrize("turned", [False, True])
def test_the_widest_pair_stays_where_it_lies(depths: tuple[int, ...], turned: bool):
    xs, ws = factors(*depths)
    ws = [w.t().contiguous().t() for w in ws] if turned else ws
    parts = in_two_parts(xs, ws)
    widest = max(range(len(depths)), key=lambda index: depths[index])
    is_apart = len(depths) > 1 and depths[widest] % 128 == 0
    assert (X_REST in parts) == is_apart
    if is_apart:
        assert parts["x"] is xs[widest]
        assert parts["w"] is ws[widest]
        assert parts[W_REST].t().is_contiguous() == turned
        assert parts[X_REST] is xs[1 - widest] or len(depths) > 2
        parts = whole(parts)
    assert set(parts) == {"x", "w"}
    exact = torch.stack([x.double() @ w.double() for x, w in zip(xs, ws, strict=True)]).sum(0)
    assert torch.equal(parts["x"].double() @ parts["w"].double(), exact)


def test_factors_of_other_layouts_or_dtypes_are_laid_side_by_side():
    xs, ws = factors(256, 128)
    assert X_REST not in in_two_parts(xs, [ws[0], ws[1].t().contiguous().t()])
    assert X_REST not in in_two_parts(*factors(256, 128, dtype=torch.float32))


@pytest.mark.parametrize(
    ("plan", "special", "takes"),
    [
        ("sequential", {}, True),
        ("per_shard", {}, True),
        ("scatter kernel=hopper", {"epilogue": Epilogue(bias=True)}, True),
        ("scatter kernel=portable", {}, False),
        ("scatter_packed", {}, True),
        ("scatter_packed matmul=early", {"m": 16}, False),
        ("sequential", {"m": 0}, False),
    ],
)
def test_which_plans_take_two_parts(plan: str, special: dict[str, object], takes: bool):
    size = {"m": 256, "n": 512, "k": 256, "dtype": "bfloat16", "world_size": 2}
    problem = Problem(operator="matmul_reduce_scatter", **(size | special))  # type: ignore[arg-type]
    name, *options = plan.split()
    built = build(f"matmul_reduce_scatter.{name}", problem, dict(each.split("=") for each in options))
    assert takes_parts(built) == takes
    assert not takes_parts(None)
