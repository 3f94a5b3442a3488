"""One island in place of many that do the same: where that is exact, and how long a large group takes to predict."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.hardware.cards import machine_for, machine_named, machine_of_ranks
from overweave.hardware.machine import Machine
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.sim.alike import MOST_WHOLE, ranks_to_simulate, told
from overweave.sim.simulate import simulate, total_us
from tests.clock import ends_within

OPERATORS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "all_to_all_matmul",
    "matmul_all_to_all",
)


def problem(operator: str, ranks: int, m: int = 1 << 14) -> Problem:
    return Problem(operator=operator, m=m, n=1024, k=1024, world_size=ranks, dtype="bfloat16")


def predicted_us(plan: str, asked: Problem, machine: Machine, only: tuple[int, ...] = ()) -> float:
    return total_us(build(f"{asked.operator}.{plan}", asked, {}, only=only), machine)


@pytest.mark.parametrize(("ranks", "part"), [(8, (0, 1, 2, 3)), (16, tuple(range(8)))])
def test_a_part_takes_what_all_take_where_ranks_have_as_many_rows(ranks: int, part: tuple[int, ...]):
    machine = machine_of_ranks("h800x8x2", 16)
    for operator in OPERATORS:
        asked = problem(operator, ranks)
        whole_us = predicted_us("sequential", asked, machine)
        assert predicted_us("sequential", asked, machine, part) == pytest.approx(whole_us, abs=1e-3)


@pytest.mark.slow
def test_an_island_of_a_plan_on_two_levels_takes_what_all_take():
    """Its ranks send, get and add as they do among all, though nobody follows what other islands do."""
    islands = ((0, 1), (2, 3), (4, 5))
    machine = machine_for(machine_named("h800x8"), 6, islands)
    for operator in OPERATORS:
        asked = replace(problem(operator, 6, 6 * 512), islands=islands)
        whole, part = (build(f"{operator}.islands", asked, {}, only=only) for only in ((), islands[1]))
        assert total_us(part, machine) == pytest.approx(total_us(whole, machine), abs=1e-3)
        kinds = [[type(each) for each in plan.schedule.of_rank(3)] for plan in (whole, part)]
        assert kinds[0] == kinds[1]


def test_ranks_of_unlike_shards_are_predicted_by_the_longest():
    machine, asked = machine_of_ranks("h800x8x2", 16), problem("all_gather_matmul", 16, 16 * 512 - 300)
    whole_us = predicted_us("sequential", asked, machine)
    assert predicted_us("sequential", asked, machine, tuple(range(8))) == pytest.approx(whole_us, rel=0.02)


def test_a_part_has_the_operations_of_its_ranks_as_the_whole_has_them():
    for operator in OPERATORS:
        asked = problem(operator, 12, 1536)
        whole, part = (build(f"{operator}.sequential", asked, {}, only=only) for only in ((), (3, 4)))
        assert part.schedule.operations == tuple(each for each in whole.schedule.operations if each.rank in (3, 4))
        assert part.schedule.goal == tuple(each for each in whole.schedule.goal if each.region.rank in (3, 4))
        assert part.schedule.given == tuple(each for each in whole.schedule.given if each.region.rank in (3, 4))


def test_a_part_is_refused_where_ranks_of_it_and_others_reach_each_other():
    with pytest.raises(ScheduleError, match="a move between ranks 1 and 2"):
        build("all_gather_matmul.push", problem("all_gather_matmul", 4), {}, only=(0, 1))


def test_small_groups_and_single_islands_are_simulated_whole():
    hosts = machine_of_ranks("h800x8x2", 64)
    assert ranks_to_simulate(hosts, MOST_WHOLE) == ()
    assert ranks_to_simulate(hosts, 64) == tuple(range(8))
    assert ranks_to_simulate(machine_of_ranks("gb200x72", 72), 72) == ()
    assert told((), 64) == ""
    assert "ranks 0 to 7 of 64" in told(tuple(range(8)), 64)


@pytest.mark.parametrize("ranks", [64, 256, pytest.param(1024, marks=pytest.mark.slow)])
def test_large_groups_are_predicted_at_once(ranks: int):
    machine = machine_of_ranks("h800x8x2", ranks)

    def predict() -> None:
        for operator in OPERATORS[: 1 if ranks > 64 else None]:
            plan = build(f"{operator}.sequential", problem(operator, ranks), {}, only=ranks_to_simulate(machine, ranks))
            assert simulate(plan, machine).total_us > 0

    ends_within(10.0, predict)
