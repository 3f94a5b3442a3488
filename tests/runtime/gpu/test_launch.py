"""What of the GPU launcher needs no GPU: plans that only a library runs, on CPU ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from overweave.ir.problem import Problem
from overweave.ir.shards import shard_rows
from overweave.memory.group import resolve
from overweave.ops.call import prepare
from overweave.ops.call.prepared import outputs_of
from overweave.ops.reference import PlainCollectives
from overweave.runtime.backends import load
from overweave.schedules.catalog.catalog import build
from tests.ranks import run_ranks


def by_torch(problem: Problem, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    collectives = PlainCollectives(resolve(None).process_group, problem.m, problem.strip)
    found: torch.Tensor = problem.record.reference({"x": x, "w": w}, collectives)
    return found


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
    wanted = by_torch(problem, x, w)
    opened = load("gpu workspace").existing(group)
    dist.barrier()
    return [torch.allclose(y, wanted, atol=1e-5), opened is None, type(run).__name__]


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_library_plans_need_no_workspace(operator):
    assert run_ranks(sequential, 2, operator) == [[True, True, "LibraryRun"]] * 2


def results_it_makes(operator: str, m: int) -> list[object]:
    """What a library's plan makes itself, and whether its result is the reference's, twice, on tensors that end in the
    middle of 16 bytes."""
    group = resolve(None)
    torch.manual_seed(group.rank)
    gathers, w = operator == "all_gather_matmul", torch.randn(16, 24)
    rows = shard_rows(m, 2, group.rank)
    own = rows[1] - rows[0]
    x = torch.randn((own if gathers else m) * 16 + 1)[1:].view(-1, 16)
    problem = Problem(operator=operator, m=m, n=24, k=16, world_size=2, dtype="float32")
    example = {"x": x, "w": w, **{name: torch.empty(shape) for name, shape, _ in outputs_of(problem, group.rank)}}
    run, bound = prepare._bind_aligned(build(f"{operator}.sequential", problem, {}, rank=group.rank), group, example)
    wanted = by_torch(problem, x, w)
    found = []
    for _ in range(2):
        given = {name: tensor for name, tensor in example.items() if name not in bound.allocated_outputs}
        run(given)
        found.append(torch.allclose(given["y"], wanted, atol=1e-5))
    dist.barrier()
    return [sorted(bound.allocated_outputs), *found]


@pytest.mark.slow
@pytest.mark.parametrize("m", [6, 7])
@pytest.mark.parametrize(
    ("operator", "makes"), [("all_gather_matmul", ["y"]), ("matmul_reduce_scatter", []), ("matmul_all_reduce", ["y"])]
)
def test_library_plans_let_the_matmul_make_what_it_fills(operator: str, makes: list[str], m: int):
    assert run_ranks(results_it_makes, 2, operator, m) == [[makes, True, True]] * 2
