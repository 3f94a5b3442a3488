"""Plans on two levels are proven whatever the islands, and none that reaches across them, or calls in another order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.plan import LIBRARY, EngineAssignment, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Collective, Credit, Notify, Operation, Put, Queue, Reduce
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog.catalog import build
from tests.plans import with_operations, with_schedule

Islands = tuple[tuple[int, ...], ...]
SIZES = {"n": 24, "k": 16, "dtype": "bfloat16"}
# Neighbours in the group or not, of one size or several, one rank alone.
LAYOUTS: tuple[Islands, ...] = (
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),
    ((0, 1), (2,)),
    ((0,), (1, 2)),
    ((0,), (1,)),
    ((0, 3), (1, 2), (4,)),
)
ROWS = (0, 1, 7, 24)


def in_rows(*sizes: int) -> Islands:
    """Islands of these sizes, of ranks side by side."""
    firsts = [sum(sizes[:at]) for at in range(len(sizes))]
    return tuple(tuple(range(first, first + size)) for first, size in zip(firsts, sizes, strict=True))


def two_levels(operator: str, islands: Islands, rows: int = 24, **options: int | str) -> Plan:
    ranks = sum(map(len, islands))
    m = OPERATORS[operator].whole_rows(rows, ranks)
    problem = Problem(operator=operator, m=m, world_size=ranks, islands=islands, **SIZES)  # type: ignore[arg-type]
    return build(f"{operator}.islands", problem, {"block_m": 16, "block_n": 16, **options})


def rules(plan: Plan) -> set[str]:
    return {refusal.rule for refusal in verify_plan(plan, MachineLimits()).refusals}


@pytest.mark.parametrize("operator", OPERATORS)
def test_two_levels_are_proven(operator: str):
    for islands, rows in product(LAYOUTS[:3], (1, 24)):
        assert rules(two_levels(operator, islands, rows)) == set(), (islands, rows)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_two_levels_are_proven_of_any_rows(operator: str):
    for islands, rows, pieces in product((*LAYOUTS, in_rows(2, 2, 2)), ROWS, (1, 3)):
        assert rules(two_levels(operator, islands, rows, pieces=pieces)) == set(), (islands, rows, pieces)


@pytest.mark.nightly
@pytest.mark.parametrize("operator", OPERATORS)
def test_two_levels_are_proven_of_up_to_four_islands_of_four(operator: str):
    for count in (2, 3, 4):
        uneven = (in_rows(*range(4, 4 - count, -1)), in_rows(*range(1, count + 1)))
        for islands, rows in product((*(in_rows(*[size] * count) for size in (1, 2, 3, 4)), *uneven), (0, 1, 13, 64)):
            assert rules(two_levels(operator, islands, rows)) == set(), (islands, rows)


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_crosses_is_the_librarys_once(operator: str):
    """Nothing but a call's part leaves an island, and no chunk crosses to an island twice: a rank of 3 x 2 gets two
    shards of four from its column, and sends as many rows."""
    plan, islands = two_levels(operator, in_rows(2, 2, 2), 48, pieces=1), in_rows(2, 2, 2)
    own = {rank: island for island in islands for rank in island}
    for operation in plan.schedule.operations:
        touched = {part.rank for part in (*operation.reads, *operation.writes)}
        assert touched | {notify.rank for notify in operation.notifies} <= {*own[operation.rank]}
    shard = 48 // 6
    crossings = 2 if OPERATORS[operator].shares_sums else 1  # as parts, and as sums
    blocks = 2 if OPERATORS[operator].exchanges else 1  # a rank has one for each rank of the other island
    calls = [one for one in plan.schedule.operations if isinstance(one, Collective) and one.rank == 0]
    sent = sum(part.shape[0] for call in calls for part in call.sources)
    assert sent == 2 * shard * crossings * blocks
    assert {call.ranks for call in calls} == {(0, 2, 4)}


def across(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan with one operation, signal or credit changed that reaches another island."""
    operations, islands = plan.schedule.operations, plan.problem.islands
    other = {rank: island[0] for island, each in zip((*islands[1:], islands[0]), islands, strict=True) for rank in each}
    for at, one in enumerate(operations):
        far = other[one.rank]

        def changed(new: Operation, at: int = at) -> Plan:
            return with_operations(plan, (*operations[:at], new, *operations[at + 1 :]))

        if isinstance(one, Put) and one.queue.startswith("copies"):
            moved = tuple(replace(part, rank=far) for part in one.destinations)
            yield f"{one.name} goes to rank {far}", changed(replace(one, destinations=moved))
        if isinstance(one, Reduce):
            read = (replace(one.operands[0], rank=far), *one.operands[1:])
            yield f"{one.name} reads on rank {far}", changed(replace(one, operands=read))
        if one.notifies:
            told = (Notify(one.notifies[0].pad, far, one.notifies[0].signal), *one.notifies[1:])
            yield f"{one.name} notifies rank {far}", changed(replace(one, notifies=told))
    credits = (*plan.schedule.credits, Credit(islands[0][0], islands[1][0]))
    yield "a credit", replace(plan, schedule=replace(plan.schedule, credits=credits))


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_no_plan_that_reaches_across_islands_is_proven(operator: str):
    mutants = [mutant for islands in LAYOUTS[:3] for mutant in across(two_levels(operator, islands))]
    assert len(mutants) > 20
    assert [name for name, mutant in mutants if not rules(mutant)] == []


def test_plans_of_one_island_are_refused_on_several_for_that_alone():
    """They are right but for their premise: every rule of schedules lets them pass."""
    for name in ("all_gather_matmul.push", "matmul_reduce_scatter.scatter", "matmul_all_to_all.push"):
        operator = name.partition(".")[0]
        problem = Problem(operator=operator, m=24, world_size=4, **SIZES)  # type: ignore[arg-type]
        plan = build(name, problem, {"block_m": 16, "block_n": 16})
        assert rules(plan) == set()
        credits = two_levels(operator, LAYOUTS[0]).schedule.credits
        parted = replace(plan, problem=replace(problem, islands=LAYOUTS[0]))
        assert rules(parted) == {"island"}
        assert rules(replace(parted, schedule=replace(plan.schedule, credits=credits))) == {"reuse"}


def in_another_order(plan: Plan, ranks: tuple[int, ...]) -> Iterator[Plan]:
    """The plan with two calls that follow each other changed, on these ranks."""
    operations = plan.schedule.operations
    calls = {rank: [at for at, one in enumerate(operations) if isinstance(one, Collective) and one.rank == rank]
             for rank in ranks}  # fmt: skip
    for number in range(min(map(len, calls.values())) - 1):
        swapped = list(operations)
        for own in calls.values():
            one, other = own[number], own[number + 1]
            swapped[one], swapped[other] = swapped[other], swapped[one]
        yield with_operations(plan, swapped)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_no_plan_whose_hosts_call_the_library_in_unlike_orders_is_proven(operator: str):
    """Of one rank of a host, and of all of them."""
    for islands in (LAYOUTS[0], LAYOUTS[1], in_rows(2, 2, 2)):
        plan = two_levels(operator, islands, 96, pieces=2)
        mutants = [one for ranks in (islands[0][:1], islands[0]) for one in in_another_order(plan, ranks)]
        assert len(mutants) >= 2
        assert all("deadlock" in rules(mutant) for mutant in mutants)


def test_calls_of_unlike_ranks_stand_on_one_stream():
    plan = two_levels("all_gather_matmul", LAYOUTS[0])
    schedule, realization, ranks = plan.schedule, plan.realization, tuple(range(4))
    call = next(one for one in schedule.operations if isinstance(one, Collective))
    operations = list(schedule.operations)
    for rank in ranks:  # of no rows
        nothing = (replace(call.sources[0], rank=rank, rows=(0, 0)),) * len(ranks)
        sides = {"sources": nothing, "destinations": nothing, "waits": (), "notifies": ()}
        named = {"name": f"all.{rank}", "rank": rank, "queue": "beside", "label": "all", "ranks": ranks}
        operations.append(replace(call, **named, **sides))
    queues = (*schedule.queues, Queue("beside", "complete"))
    engines = (*realization.engines, EngineAssignment("beside", LIBRARY))
    changed = with_schedule(plan, queues=queues, operations=tuple(operations))
    assert "island" in rules(replace(changed, realization=replace(realization, engines=engines)))


@pytest.mark.parametrize("islands", [((0, 1),), ((0, 1), (1, 2, 3)), ((0, 1), (2, 4))])
def test_islands_name_every_rank_once(islands: Islands):
    plan = two_levels("all_gather_matmul", LAYOUTS[0])
    problem = replace(plan.problem, islands=islands)
    assert rules(replace(plan, problem=problem)) == {"form"}
    with pytest.raises(InputError, match="Name every rank once"):
        build(plan.name, problem, {})
