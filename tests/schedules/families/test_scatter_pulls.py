"""Reduce-scatter by sums that pull: what is announced to whom, and what the proof refuses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from msgspec.structs import replace

from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Compute, Copy, Operation, Reduce
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog.catalog import build

NAME = "matmul_reduce_scatter.scatter_pull"
PROBLEM = Problem(operator="matmul_reduce_scatter", m=300, n=40, k=32, world_size=3, dtype="bfloat16")
SMALL = {"block_m": 16, "block_n": 16}


def changed(plan: Plan, change: Callable[[Operation], Operation]) -> Plan:
    schedule = replace(plan.schedule, operations=tuple(map(change, plan.schedule.operations)))
    return replace(plan, schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"pieces": 1, "own_pieces": 1}, {"pieces": 3, "own_pieces": 2}, {"kernel": "hopper", "sms": 8}]
)
def test_what_is_built_is_proven(options: dict[str, str | int]):
    for world_size, m in product((1, 2, 3, 4, 8), (0, 1, 2, 97, 300)):
        plan = build(NAME, replace(PROBLEM, m=m, world_size=world_size), options)
        assert verify_plan(plan, MachineLimits()).refusals == (), (world_size, m)


@pytest.mark.parametrize(
    "changes",
    [
        {"epilogue": Epilogue(bias=True, activation="silu", residual=True)},
        {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "epilogue": Epilogue(scaling="rows")},
    ],
)
def test_so_are_finished_sums_and_those_of_fp8(changes: dict[str, object]):
    problem = replace(PROBLEM, b_is_transposed=True, **changes)
    assert verify_plan(build(NAME, problem, {}), MachineLimits()).ok


def test_nothing_is_moved_but_by_sums_in_rank_order():
    plan = build(NAME, PROBLEM, SMALL | {"own_pieces": 2})
    mine = [each for each in plan.schedule.operations if each.rank == 1]
    tiles, told, sums = ([each for each in mine if isinstance(each, kind)] for kind in (Compute, Copy, Reduce))
    assert len(tiles) + len(told) + len(sums) == len(mine)
    assert not any(each.reads or each.writes for each in told)
    assert [each.notifies[0].rank for each in told] == [2, 2, 0, 0]
    assert [each.out[0].rows for each in tiles] == [(200, 248), (248, 300), (0, 48), (48, 100), (100, 148), (148, 200)]
    assert [(part.buffer, part.rank) for part in sums[0].operands] == [("partial", rank) for rank in range(3)]
    assert [{part.rows for part in each.operands} for each in sums] == [{(100, 148)}, {(148, 200)}]


def test_a_sum_waits_for_the_pieces_that_it_reads_and_no_more():
    sums = [
        each for each in build(NAME, PROBLEM, SMALL | {"own_pieces": 2}).schedule.of_rank(1) if type(each) is Reduce
    ]
    told = [next(wait.signals for wait in each.waits if wait.pad == "told") for each in sums]
    assert told == [(0, 2), (2, 4)]


@pytest.mark.parametrize("kind", [Copy, Reduce])
def test_who_does_not_wait_for_the_tiles_is_refused(kind: type[Operation]):
    """Whether it is the one who tells, or the one who is told."""
    plan = build(NAME, PROBLEM, SMALL)
    early = changed(plan, lambda each: replace(each, waits=()) if isinstance(each, kind) else each)
    assert not verify_plan(early, MachineLimits()).ok
