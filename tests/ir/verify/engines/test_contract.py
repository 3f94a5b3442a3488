"""Given and Goal of a plan are those of its Problem."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Operation, Schedule
from overweave.ir.verify.plan import MachineLimits, verify_plan
from tests.plans import plan_of, refusals, with_schedule

PLANS = (
    "all_gather_matmul.push",
    "all_gather_matmul.sequential",
    "matmul_reduce_scatter.scatter",
    "matmul_all_reduce.two_shot",
)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"m": 101}, "no goal meets"),
        ({"m": 99}, "the problem"),
        ({"n": 65}, "the problem has 65"),
        ({"k": 33}, "the problem"),
        ({"out_dtype": "float32"}, "of float32"),
        ({"columns": (32, 32)}, "the problem has 32"),
        ({"operator": "gather"}, "there is no operator gather"),
    ],
)
def test_a_plan_of_another_problem_is_refused(name: str, change: dict[str, object], word: str):
    plan = plan_of(name)
    assert not refusals(plan)
    assert word in refusals(replace(plan, problem=replace(plan.problem, **change)))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("other", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_plan_of_another_operator_is_refused(name: str, other: str):
    plan = plan_of(name)
    assert bool(refusals(replace(plan, problem=replace(plan.problem, operator=other)))) == (
        plan.problem.operator != other
    )


def test_what_is_gathered_is_owed_where_the_problem_returns_it():
    plan, returned = plan_of(PLANS[0]), plan_of(PLANS[0], returns_gathered=True)
    assert not refusals(returned)
    assert "no goal meets the problem's postcondition" in refusals(replace(plan, problem=returned.problem))
    assert "the problem has no output gathered_out" in refusals(replace(returned, problem=plan.problem))


@pytest.mark.parametrize("name", PLANS)
def test_a_schedule_that_promises_less_is_refused(name: str):
    plan = plan_of(name)
    assert "no goal meets" in refusals(with_schedule(plan, goal=()))
    assert "no goal meets" in refusals(with_schedule(plan, goal=plan.schedule.goal[1:]))


def test_a_plan_without_operations_is_refused():
    problem = Problem(operator="all_gather_matmul", m=8, n=8, k=8, world_size=2, dtype="bfloat16")
    realization = replace(plan_of(PLANS[1]).realization, engines=())
    schedule = Schedule(name="empty", world_size=2, buffers=(), queues=(), given=(), goal=(), operations=())
    empty = Plan(name="empty", problem=problem, schedule=schedule, realization=realization)
    assert refusals(empty).count("no goal meets the problem's postcondition") == 2


@pytest.mark.parametrize("name", PLANS)
def test_a_schedule_that_assumes_more_is_refused(name: str):
    """The first Given, moved by a row: the values of the schedule are wrong then, or the operand is another one."""
    plan = plan_of(name)
    moved = tuple(replace(one, row=one.row + 1000) for one in plan.schedule.given if one.tensor == "a")
    others = tuple(one for one in plan.schedule.given if one.tensor != "a")
    changed = replace(plan.schedule, given=(*moved, *others), goal=tuple(_moved(plan.schedule)))
    assert "but the problem gives a[" in refusals(replace(plan, schedule=changed))


def _moved(schedule: Schedule) -> list[Operation]:
    return [replace(goal, row=goal.row + 1000) for goal in schedule.goal]


def test_of_a_problem_without_an_operator_the_verdict_says_so():
    plan = plan_of(PLANS[0])
    verdict = verify_plan(replace(plan, problem=replace(plan.problem, operator="")), MachineLimits())
    assert verdict.ok
    assert "names no operator" in verdict.notes[0]
    assert not verify_plan(plan, MachineLimits()).notes
