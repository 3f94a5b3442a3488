"""Library matmuls and collectives piece by piece: proven for every world size, and what runs beside what."""

from __future__ import annotations

import pytest

from overweave.ir.launch.streams import queues_beside
from overweave.ir.operators.matmul_all_reduce import OPERATOR as ALL_REDUCE
from overweave.ir.operators.matmul_reduce_scatter import OPERATOR as REDUCE_SCATTER
from overweave.ir.plan import LIBRARY, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Collective
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog.catalog import build
from overweave.schedules.communication import EXCHANGES

OPERATORS = (ALL_REDUCE.name, REDUCE_SCATTER.name)


def decomposed(operator: str, m: int, world_size: int, pieces: int = 3) -> Plan:
    problem = Problem(operator=operator, m=m, n=344, k=64, world_size=world_size, dtype="bfloat16")
    return build(f"{operator}.decomposed", problem, {"pieces": pieces})


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_proven_for_every_world_size_and_any_rows(operator: str):
    for world_size in range(1, 9):
        for m in (0, 1, 33, 1000):
            verdict = verify_plan(decomposed(operator, m, world_size), MachineLimits())
            assert verdict.ok, f"{world_size} {m} {verdict}"


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_collective_runs_beside_the_matmul_of_the_next_piece(operator: str):
    plan = decomposed(operator, 1000, 2)
    assert {one.engine for one in plan.realization.engines} == {LIBRARY}
    assert queues_beside(plan) == {EXCHANGES}
    parts = [one for one in plan.schedule.of_rank(0) if isinstance(one, Collective)]
    assert len(parts) == 3
    assert all(one.waits for one in parts)
