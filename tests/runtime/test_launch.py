"""What of the GPU launcher needs no GPU: plans that only a library runs, on CPU ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from overweave.ir.plan import Problem
from overweave.memory.group import resolve
from overweave.ops import reference
from overweave.runtime.backends import load
from overweave.runtime.processes import run_ranks
from overweave.schedules.catalog import build


def sequential(operator: str) -> list[object]:
    """Whether the result is the reference's, no workspace was made, and the board knows that this rank is done."""
    group = resolve(None)
    torch.manual_seed(group.rank)
    w = torch.randn(16, 24)
    gathers = operator == "all_gather_matmul"
    x = torch.randn(3 if gathers else 6, 16)
    y = torch.full((6 if gathers else 3, 24), float("nan"))
    problem = Problem(operator=operator, m=6, n=24, k=16, world_size=2, dtype="float32")
    tensors = {"x": x, "w": w, "y": y}
    run = load("gpu launch")(build(f"{operator}.sequential", problem, {}, rank=group.rank), group, tensors)
    run(tensors)
    wanted = reference.all_gather_matmul(x, w) if gathers else reference.matmul_reduce_scatter(x, w)
    opened = load("gpu workspace").opened(group, w.device)
    dist.barrier()
    return [torch.allclose(y, wanted, atol=1e-5), opened is None, type(run).__name__]


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_library_plans_need_no_workspace(operator):
    assert run_ranks(sequential, 2, operator) == [[True, True, "LibraryRun"]] * 2
