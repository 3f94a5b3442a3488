"""Library operations made ready: factors in two parts give the product of the whole ones."""

from __future__ import annotations

import pytest
import torch

from overweave.ir.plan import W_REST, X_REST
from overweave.ir.problem import Problem
from overweave.ir.schedule import Compute
from overweave.memory.group import resolve
from overweave.runtime.library.calls import library_call
from overweave.runtime.library.views import shapes_of
from overweave.schedules.catalog.catalog import build
from tests.ranks import run_ranks

M, N, K, FIRST = 10, 24, 40, 24


def products(plan: str, has_room: bool) -> None:
    problem = Problem(operator="matmul_reduce_scatter", m=M, n=N, k=K, world_size=2, dtype="float32")
    schedule = build(f"matmul_reduce_scatter.{plan}", problem, {}, rank=0).schedule
    x, w = torch.randint(-2, 3, (M, K)).float(), torch.randint(-2, 3, (K, N)).float()
    computes = [each for each in schedule.of_rank(0) if isinstance(each, Compute)]
    out = {part.buffer for each in computes for part in each.out}
    parts = {"x": x[:, :FIRST].contiguous(), "w": w[:FIRST], X_REST: x[:, FIRST:].contiguous(), W_REST: w[FIRST:]}
    room = {name: torch.full((M, N), torch.nan) for name in out}
    shapes = shapes_of(parts) | dict.fromkeys(out, (M, N))
    tensors = parts | (room if has_room else {})
    for compute in computes:
        library_call(compute, problem, shapes, resolve(None))(tensors)
    (name,) = out
    assert torch.equal(tensors[name], x @ w)


@pytest.mark.parametrize(("plan", "has_room"), [("sequential", False), ("sequential", True), ("per_shard", True)])
def test_products_of_factors_in_two_parts(plan: str, has_room: bool):
    run_ranks(products, 1, plan, has_room)
