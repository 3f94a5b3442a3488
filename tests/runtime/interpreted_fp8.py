"""fp8 (e4m3) in the interpreter: its numbers, its dots, and the real kernels with scales.

Run by test_interpreter.py in a process of its own, as interpreted_kernels.py is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from overweave.runtime.interpreted import interpreter

interpreter.repair()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from overweave.ir.epilogue import Epilogue  # noqa: E402
from overweave.ir.problem import Problem  # noqa: E402
from overweave.ir.shards import shard_rows  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.host.host import run_on_host  # noqa: E402
from overweave.runtime.library.epilogue import apply_epilogue  # noqa: E402
from overweave.schedules.catalog import catalog  # noqa: E402
from tests.ops import reference  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.runtime.interpreted_kernels import convert_kernel  # noqa: E402

TILES: dict[str, str | int] = {"block_m": 16, "block_n": 32, "block_k": 32, "pieces": 2}


def test_every_fp8_number_widens_exactly():
    source = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    target = torch.zeros(len(source), dtype=torch.float32)
    convert_kernel[(1,)](source, target, len(source), 256)
    assert torch.equal(target.nan_to_num(7.0), source.float().nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_to_fp8_is_torchs_within_its_range(dtype: torch.dtype):
    spread = torch.randn(8192, generator=torch.Generator().manual_seed(3)) * 50
    source = torch.cat([spread, torch.tensor([0.0, 448.0, 1e-3, torch.nan, 1e6, -torch.inf])]).to(dtype)
    target = torch.zeros(len(source), dtype=torch.float8_e4m3fn)
    convert_kernel[(2,)](source, target, len(source), 8192)
    expected = source.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    assert torch.equal(target.float().nan_to_num(7.0), expected.float().nan_to_num(7.0))
    assert target[-3:].float().isnan().tolist() == [True, False, False]


def test_dot_of_fp8_against_fp64():
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(32, 64, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    out = torch.full((32, 32), torch.nan)
    stored = [TensorDescriptor.from_tensor(matrix, [32, 64]) for matrix in (a, b)]
    dot_of_stored_kernel[(1,)](*stored, out)
    exact = a.double() @ b.double().t()
    assert (out - exact).norm() / exact.norm() < 1e-6


@triton.jit
def dot_of_stored_kernel(a, b, out):
    left, right = a.load([0, 0]), b.load([0, 0]).T
    rows, cols = tl.arange(0, left.shape[0]), tl.arange(0, right.shape[1])
    tl.store(out + rows[:, None] * right.shape[1] + cols[None, :], tl.dot(left, right))


def wrong_fp8_plans() -> list[str]:
    """The real kernels on fp8 operands and their scales: integers, so every bit must be right."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    m, n, k = 37, 48, 64
    generator = torch.Generator().manual_seed(m)
    whole, w = (torch.randint(-2, 3, (rows, k), generator=generator).float() for rows in (m, n))
    by_row, by_column = (2.0 ** torch.randint(-2, 3, shape, generator=generator) for shape in ((m, 1), (1, n)))
    own = slice(rank * -(-m // ranks), min((rank + 1) * -(-m // ranks), m))
    for scaling, plan, options in (
        ("rows", "push", TILES),
        ("rows", "push", TILES | {"mover": "copy_kernel", "copy_programs": 2}),
        ("rows", "pull", TILES),
        ("tensor", "push", TILES),
    ):
        problem = Problem(
            operator="all_gather_matmul",
            m=m,
            n=n,
            k=k,
            world_size=ranks,
            dtype="float8_e4m3fn",
            b_is_transposed=True,
            epilogue=Epilogue(scaling=scaling),  # type: ignore[arg-type]
            out_dtype="bfloat16",
        )
        scales = (by_row, by_column) if scaling == "rows" else (torch.full((1, 1), 0.5), torch.full((1, 1), 4.0))
        inputs = {"x": whole[own].to(torch.float8_e4m3fn), "w": w.to(torch.float8_e4m3fn).t(), "scale_w": scales[1]}
        inputs["scale_x"] = scales[0][own].contiguous() if scaling == "rows" else scales[0]
        y = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
        built = catalog.build(f"all_gather_matmul.{plan}", problem, options)
        run_on_host(built, resolve(None), inputs, {"y": y}, depth="interpreter")
        exact = (whole @ w.t()) * scales[0] * scales[1]
        if not torch.equal(y, exact.bfloat16()):
            wrong.append(f"{scaling} {plan} {options}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_fp8_operands_and_their_scales(world_size: int):
    assert run_ranks(wrong_fp8_plans, world_size) == [[]] * world_size


SHAPED: dict[str, Any] = {"m": 37, "n": 48, "dtype": "float8_e4m3fn", "b_is_transposed": True, "out_dtype": "bfloat16"}


def wrong_gates() -> list[str]:
    """Two products of each tile, each scaled by its own: integers, so every bit must be right; then floats."""
    group, wrong = resolve(None), []
    m, n, k = SHAPED["m"], SHAPED["n"], 64
    generator = torch.Generator().manual_seed(m)
    own = slice(*shard_rows(m, group.world_size, group.rank))
    for scaling, plan, options, activation in (
        ("rows", "push", TILES, None),
        ("rows", "push", TILES | {"mover": "copy_kernel", "copy_programs": 2}, None),
        ("rows", "pull", TILES, None),
        ("tensor", "push", TILES, None),
        ("tensor", "sequential", {}, None),
        ("rows", "push", TILES, "silu"),
        ("tensor", "push", TILES, "gelu"),
    ):
        draw = torch.randn if activation else lambda *shape, generator: torch.randint(-2, 3, shape, generator=generator)
        whole, w, gate = (draw(rows, k, generator=generator).to(torch.float8_e4m3fn) for rows in (m, n, n))
        by_row, by_column = (2.0 ** torch.randint(-2, 3, shape, generator=generator) for shape in ((m, 1), (1, 2 * n)))
        if scaling == "tensor":
            by_row, by_column = torch.full((1, 1), 0.5), torch.tensor([[4.0, 0.25]])
        epilogue = Epilogue(scaling=scaling, activation=activation, residual=activation is not None, gate=True)  # type: ignore[arg-type]
        problem = Problem(operator="all_gather_matmul", k=k, world_size=group.world_size, epilogue=epilogue, **SHAPED)
        inputs = {"x": whole[own], "w": w.t(), "gate": gate.t(), "scale_w": by_column}
        inputs["scale_x"] = by_row[own].contiguous() if scaling == "rows" else by_row
        extras = {"residual": torch.randn(m, n, generator=generator).bfloat16()} if epilogue.residual else {}
        y = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
        built = catalog.build(f"all_gather_matmul.{plan}", problem, options)
        run_on_host(built, group, inputs | extras, {"y": y}, depth="interpreter")
        of_w, of_gate = by_column.double().chunk(2, dim=1)
        exact = (whole.double() @ w.double().t()) * by_row * of_w
        wide = {name: each.double() for name, each in extras.items()}
        product = (whole.double() @ gate.double().t()) * by_row * of_gate
        apply_epilogue(exact, slice(0, m), Epilogue(activation=activation, residual=epilogue.residual), wide, product)  # type: ignore[arg-type]
        is_right = torch.allclose(y.double(), exact, rtol=2**-7, atol=2**-7) if activation else None
        if not (torch.equal(y, exact.bfloat16()) if is_right is None else is_right):
            wrong.append(f"{scaling} {plan} {options} {activation}: {float((y.double() - exact).abs().max())}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gates_of_fp8_and_their_own_scales(world_size: int):
    assert run_ranks(wrong_gates, world_size) == [[]] * world_size


SUMMED: tuple[tuple[str, str, dict[str, str | int]], ...] = (
    ("rows", "matmul_reduce_scatter.scatter", TILES),
    ("rows", "matmul_reduce_scatter.scatter", TILES | {"sums": "epilogue"}),
    ("rows", "matmul_reduce_scatter.scatter", TILES | {"mover": "copy_kernel", "copy_programs": 2}),
    ("rows", "matmul_reduce_scatter.fused_ring", TILES),
    ("rows", "matmul_reduce_scatter.scatter_pull", {}),
    ("tensor", "matmul_reduce_scatter.scatter", TILES | {"sums": "epilogue"}),
    ("rows", "matmul_all_reduce.one_shot_packed", {}),
    ("rows", "matmul_all_reduce.two_shot_packed", {}),
    ("rows", "matmul_all_reduce.two_shot", TILES),
    ("tensor", "matmul_all_reduce.two_shot", TILES | {"sums": "epilogue"}),
)


def wrong_fp8_sums() -> list[str]:
    """The same where products are summed over ranks, each scaled by its own rank's scales."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    m, n, k = 37, 48, 64
    generator = torch.Generator().manual_seed(rank)
    x, w = (torch.randint(-1, 2, (rows, k), generator=generator).float() for rows in (m, n))
    by_row, by_column = (2.0 ** torch.randint(-1, 1, shape, generator=generator) for shape in ((m, 1), (1, n)))
    own = slice(*shard_rows(m, ranks, rank))
    for scaling, name, options in SUMMED:
        problem = Problem(
            operator=name.partition(".")[0],
            m=m,
            n=n,
            k=k,
            world_size=ranks,
            dtype="float8_e4m3fn",
            b_is_transposed=True,
            epilogue=Epilogue(scaling=scaling),  # type: ignore[arg-type]
            out_dtype="bfloat16",
        )
        scales = (by_row, by_column) if scaling == "rows" else (torch.full((1, 1), 2.0 - rank), torch.ones(1, 1))
        inputs = {"x": x.to(torch.float8_e4m3fn), "w": w.to(torch.float8_e4m3fn).t()}
        inputs |= {"scale_x": scales[0], "scale_w": scales[1]}
        exact = reference.scaled_matmul_all_reduce(x, w.t(), *scales)
        exact = exact[own] if name.startswith("matmul_reduce_scatter") else exact
        y = torch.full(exact.shape, torch.nan, dtype=torch.bfloat16)
        run_on_host(catalog.build(name, problem, options), resolve(None), inputs, {"y": y}, depth="interpreter")
        if not torch.equal(y, exact.bfloat16()):
            wrong.append(f"{scaling} {name} {options}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_of_fp8_products(world_size: int):
    assert run_ranks(wrong_fp8_sums, world_size) == [[]] * world_size
