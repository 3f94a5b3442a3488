"""Library operations made ready: factors in two parts, and collectives of whole buffers, which have a short way."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from overweave.ir.operators.registry import OPERATORS
from overweave.ir.plan import W_REST, X_REST
from overweave.ir.problem import Problem
from overweave.ir.schedule import Collective, Compute
from overweave.memory.group import resolve
from overweave.runtime.library import calls
from overweave.runtime.library.calls import Views, library_call, merge_parts, shapes_of
from overweave.runtime.library.library import run_operation
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


def collective(operator: str) -> bool:
    """A library plan's collective as one of single parts, on its short way and in full, on elements that differ by
    rank: it does what the one of parts for each rank does."""
    group = resolve(None)
    problem = Problem(operator=operator, m=3 * M, n=N, k=K, world_size=group.world_size, dtype="float32")
    operations = build(f"{operator}.sequential", problem, {}).schedule.of_rank(group.rank)
    (moves,) = (each for each in operations if isinstance(each, Collective))
    shapes = {part.buffer: (part.rows[1], part.cols[1]) for part in moves.reads + moves.writes}  # of the last rows
    values = {name: torch.randint(-9, 10, shape).float() + 100 * group.rank for name, shape in shapes.items()}
    whole, short, full = merge_parts(moves, shapes, {}), _copied(values), _copied(values)
    for operation, tensors in ((moves, values), (whole, full)):
        run_operation(operation, Views((operation,), shapes).of(tensors), group)
    with patch.object(calls, "_general_call"):  # which the short way does without; ranks go on to other tests
        library_call(whole, problem, shapes, group)(short)
    return all(torch.equal(found[name], value) for name, value in values.items() for found in (short, full))


def _copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("operator", OPERATORS)
def test_collectives_of_whole_buffers(operator: str):
    assert run_ranks(collective, 3, operator) == [True] * 3
