"""Matmuls by columns of the weight in the emulation: the bits of the plan that multiplies by all of it at once."""

from __future__ import annotations

import pytest
import torch

from overweave.ir.dtype import Dtype
from overweave.ir.epilogue import Epilogue
from overweave.ir.operators.forms import BIAS, GATE, RESIDUAL, SCALE_W, SCALE_X
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.memory.group import resolve
from overweave.runtime.host.host import run_on_host
from overweave.runtime.library.epilogue import slice_columns
from overweave.schedules.catalog import catalog
from tests.ir.column_chunks import gathered, scattered
from tests.ranks import run_ranks

BUILD = {"matmul_reduce_scatter": scattered, "all_gather_matmul": gathered}
# Without an activation: the processor computes those of the last few numbers of a row by another way than the others.
ENDINGS: tuple[tuple[str, Dtype, Dtype | None, Epilogue], ...] = (
    ("all_gather_matmul", "float32", None, Epilogue()),
    ("all_gather_matmul", "float32", None, Epilogue(bias=True, residual=True)),
    ("all_gather_matmul", "float32", None, Epilogue(gate=True)),
    ("all_gather_matmul", "float8_e4m3fn", "bfloat16", Epilogue(scaling="tensor", bias=True)),
    ("matmul_reduce_scatter", "float32", None, Epilogue()),
    ("matmul_reduce_scatter", "float32", None, Epilogue(bias=True, residual=True)),
)


def whole_numbers(shape: tuple[int, ...], seed: int, most: int = 3) -> torch.Tensor:
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def tensors_of(problem: Problem, rank: int) -> dict[str, torch.Tensor]:
    dtype, names = getattr(torch, problem.dtype), {BIAS, RESIDUAL, GATE, SCALE_X, SCALE_W}
    tensors = {
        "x": whole_numbers((problem.operand_rows(rank), problem.k), rank).to(dtype),
        "w": whole_numbers((problem.n, problem.k), 50 + rank).to(dtype).t(),
    }
    epilogue = problem.epilogue
    wanted = {BIAS: epilogue.bias, RESIDUAL: epilogue.residual, GATE: epilogue.gate}
    wanted |= dict.fromkeys((SCALE_X, SCALE_W), epilogue.scaling is not None)
    for name in sorted(name for name in names if wanted[name]):
        rows, cols, kind = problem.operand(name, rank)
        made = whole_numbers((rows, cols), 100 + len(name)).abs() + 1
        tensors[name] = made.to(getattr(torch, kind))
    return tensors


def differ(m: int) -> list[str]:
    """The endings after which a plan by columns has other bits than the sequential plan."""
    group, wrong = resolve(None), []
    for operator, dtype, out_dtype, epilogue in ENDINGS:
        size = group.world_size
        problem = Problem(
            operator=operator,
            m=m,
            n=40,
            k=16,
            world_size=size,
            dtype=dtype,
            out_dtype=out_dtype,
            epilogue=epilogue,
            b_is_transposed=True,
        )
        tensors, found = tensors_of(problem, group.rank), []
        plans: tuple[Plan, ...] = (catalog.build(f"{operator}.sequential", problem, {}), BUILD[operator](problem, 3))
        for plan in plans:
            shape = problem.result_rows(group.rank), problem.n
            y = torch.full(shape, torch.nan, dtype=getattr(torch, problem.result_dtype))
            run_on_host(plan, group, tensors, {"y": y}, timeout_s=20)
            found.append(y)
        if not torch.equal(*found):
            wrong.append(f"{operator} {epilogue}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_chunks_by_columns_have_the_bits_of_the_whole(world_size: int):
    for ran in run_ranks(differ, world_size, 37):
        assert ran == []


def test_scales_of_a_weight_and_of_its_gate_are_cut_alike():
    scales = torch.arange(12).view(1, 12)
    one = slice_columns({SCALE_W: scales, BIAS: torch.arange(6)}, (2, 5), 6)
    assert one[SCALE_W].tolist() == [[2, 3, 4, 8, 9, 10]]
    assert one[BIAS].tolist() == [2, 3, 4]
    assert slice_columns({SCALE_W: scales[:, :1]}, (2, 5), 6)[SCALE_W].tolist() == [[0]]
