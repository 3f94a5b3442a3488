"""Several weights in one table, and gates: the real kernels, interpreted.

Run by test_interpreter.py in a process of its own, as interpreted_kernels.py is.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from campaigns.exact.exactness import Case, compute, make_data  # noqa: E402
from overweave.ir.epilogue import Epilogue  # noqa: E402
from overweave.ir.plan import indexed_name  # noqa: E402
from overweave.ir.problem import Problem  # noqa: E402
from overweave.ir.shards import shard_rows  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.runtime.host.host import run_on_host  # noqa: E402
from overweave.runtime.library.epilogue import apply_epilogue  # noqa: E402
from overweave.schedules.catalog import catalog  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host interpreter")  # here, once, and not in every rank


def run_several_weights() -> list[str]:
    """One table of tiles of two and three weights: in both layouts, cut tiles among them, and fewer rows than ranks."""
    group, wrong = resolve(None), []
    cut: dict[str, int | str] = {"block_n": 128, "split_n": 2, "sms": 6}
    tried: tuple[tuple[str, int, tuple[int, ...], dict[str, int | str]], ...] = (
        ("push", 37, (24, 64), {"pieces": 2}),
        ("push", 37, (200, 8, 40), cut),
        ("push", 75, (8, 104), {"mover": "copy_kernel", "copy_programs": 1}),
        ("pull", 50, (40, 8, 16), {"pieces": 2}),
        ("push", 1, (8, 8, 8), {}),
        ("push", 0, (8, 16), {}),
    )
    for schedule, m, columns, options in tried:
        problem = Problem(
            operator="all_gather_matmul",
            m=m,
            n=sum(columns),
            k=16,
            world_size=group.world_size,
            dtype="bfloat16",
            b_is_transposed=len(columns) == 3,
            columns=columns,
        )
        case = Case(f"all_gather_matmul.{schedule}", problem, {"block_m": 16, "block_n": 32, **options}, seed=m)
        plan = catalog.build(case.schedule, problem, case.options)
        assert not m or {row.weight for row in plan.tile_order(group.rank, "tiles").rows} == set(range(len(columns)))
        for call in range(2):
            data = make_data(case, group.rank, is_integer=True, call=call)
            if not torch.equal(compute(case, plan, group, data, "interpreter"), data.exact.bfloat16()):
                wrong.append(f"{case} call {call}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_tiles_of_several_weights_are_exact(world_size: int):
    assert run_ranks(run_several_weights, world_size) == [[]] * world_size


def run_gated() -> list[str]:
    """Two products of each tile, in both layouts, with and without a residual, in ragged tiles."""
    group, wrong = resolve(None), []
    torch.manual_seed(group.rank)
    rows, n, k = 20, 40, 24
    x, w, gate = torch.randn(rows, k).bfloat16(), torch.randn(k, n).bfloat16(), torch.randn(k, n).bfloat16()
    m = rows * group.world_size
    residual, gathered = torch.randn(m, n).bfloat16(), torch.empty(m, k)
    dist.all_gather_into_tensor(gathered, x.float())
    for activation, has_residual, is_transposed in (("silu", False, False), ("gelu", True, True), (None, False, True)):
        epilogue = Epilogue(activation=activation, residual=has_residual, gate=True)
        shape = {"m": m, "n": n, "k": k, "world_size": group.world_size, "dtype": "bfloat16"}
        problem = Problem(operator="all_gather_matmul", epilogue=epilogue, b_is_transposed=is_transposed, **shape)
        plan = catalog.build("all_gather_matmul.push", problem, {"block_m": 16, "block_n": 32, "block_k": 16})
        weights = {"w": w, "gate": gate}
        if is_transposed:
            weights = {name: each.t().contiguous().t() for name, each in weights.items()}
        extras = {"residual": residual} if has_residual else {}
        y = torch.full((m, n), torch.nan).bfloat16()
        run_on_host(plan, group, {"x": x, **weights, **extras}, {"y": y}, depth="interpreter")
        exact, wide = gathered @ w.float(), {name: each.float() for name, each in extras.items()}
        apply_epilogue(exact, slice(0, m), epilogue, wide, gathered @ gate.float())
        if not torch.allclose(y.float(), exact, rtol=2**-7, atol=2**-7):  # one rounding
            wrong.append(f"{activation}: {float((y.float() - exact).abs().max())}")
    return wrong


def test_kernels_gate_their_tiles():
    assert run_ranks(run_gated, 2) == [[]] * 2


def wrong_finished_products() -> list[str]:
    """Bias and scales for the columns of all weights: what each tile reads begins at those of its own."""
    group, wrong = resolve(None), []
    generator = torch.Generator().manual_seed(5)
    m, columns, k = 20, (48, 16, 32), 64
    n, own = sum(columns), slice(*shard_rows(m, group.world_size, group.rank))
    x = torch.randint(-1, 2, (m, k), generator=generator).float()
    weights = [torch.randint(-1, 2, (cols, k), generator=generator).float() for cols in columns]
    bias = torch.randint(-2, 3, (1, n), generator=generator).bfloat16()
    by_row, by_column = (2.0 ** torch.randint(0, 2, shape, generator=generator) for shape in ((m, 1), (1, n)))
    product = torch.cat([x @ w.t() for w in weights], dim=1)
    for dtype, scaling, plan in (
        ("bfloat16", None, "push"),
        ("float8_e4m3fn", "rows", "push"),
        ("float8_e4m3fn", "rows", "pull"),
        ("float8_e4m3fn", "tensor", "push"),
    ):
        problem = Problem(
            operator="all_gather_matmul",
            m=m,
            n=n,
            k=k,
            world_size=group.world_size,
            dtype=dtype,  # type: ignore[arg-type]
            b_is_transposed=True,
            columns=columns,
            epilogue=Epilogue(bias=True, scaling=scaling),  # type: ignore[arg-type]
            out_dtype="bfloat16" if scaling else None,
        )
        scales = {"rows": (by_row, by_column), "tensor": (torch.full((1, 1), 2.0), torch.full((1, 1), 0.5))}
        inputs = {"x": x[own].to(getattr(torch, dtype)), "bias": bias}
        inputs |= {indexed_name("w", at): w.to(getattr(torch, dtype)).t() for at, w in enumerate(weights)}
        exact = product
        if scaling:
            of_x, of_w = scales[scaling]
            inputs |= {"scale_x": of_x[own].contiguous() if scaling == "rows" else of_x, "scale_w": of_w}
            exact = exact * of_x * of_w
        exact = (exact + bias.float()).bfloat16()
        outputs = {
            indexed_name("y", at): torch.full((m, cols), torch.nan).bfloat16() for at, cols in enumerate(columns)
        }
        tiles = {"block_m": 16, "block_n": 32, "block_k": 32}
        run_on_host(catalog.build(f"all_gather_matmul.{plan}", problem, tiles), group, inputs, outputs, "interpreter")
        if not torch.equal(torch.cat(list(outputs.values()), dim=1), exact):
            wrong.append(f"{dtype} {scaling} {plan}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_products_of_several_weights_are_finished(world_size: int):
    assert run_ranks(wrong_finished_products, world_size) == [[]] * world_size
