"""The judge of plans: it knows nothing of what it judges, sees what is wrong, and nothing wrong in right plans."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from campaigns.oracle.plans import broken_plans, gpu_model, plan_mutations
from campaigns.oracle.plans.bound import obstacle
from campaigns.oracle.plans.broken_plans import MUTATIONS, right_plans
from campaigns.oracle.plans.gpu_model import hang, race
from campaigns.oracle.plans.library_scatter import scatter
from campaigns.oracle.plans.other_verifier import OtherVerifier
from overweave.ir.launch.order import launch_order
from overweave.ir.launch.streams import first_own_waits, queues_beside
from overweave.ir.plan import COPY_ENGINE, COPY_KERNEL, Plan

JUDGED = ("overweave.ir.verify", "overweave.ir.launch", "overweave.sim", "overweave.runtime")


@cache
def plans() -> list[Plan]:
    return list(right_plans())


def test_the_judge_imports_nothing_that_it_judges():
    tree = ast.parse(Path(str(gpu_model.__file__)).read_text())
    named = [one.module or "" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]
    named += [name.name for one in ast.walk(tree) if isinstance(one, ast.Import) for name in one.names]
    assert len(named) > 3
    assert not [name for name in named if name.startswith(JUDGED)]


@pytest.mark.slow
def test_both_say_alike_how_a_plan_is_launched():
    rng = Random(3)
    changed = [
        plan_mutations.mutant(name, rng, plans())
        for name in ("drop_after", "launch_order", "drop_waits")
        for _ in range(30)
    ]
    for plan in (*plans(), *changed):
        assert gpu_model.own_streams(plan) == queues_beside(plan)
        for rank in range(plan.schedule.world_size):
            launched = gpu_model.launches(plan, rank)
            assert [(one.queue, one.operations) for one in launched] == [
                (one.queue, one.operations) for one in launch_order(plan, rank)
            ]
            for one in launched:
                if one.is_kernel and one.stream:
                    assert one.gate == first_own_waits(tuple(plan.schedule.of_rank(rank)), one.queue)


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_right_plans_end_in_order_and_bind(every: int):
    assert len(plans()) > 150
    assert [found for plan in plans()[::every] if (found := hang(plan) or race(plan) or obstacle(plan))] == []


def test_sums_that_take_every_sm_before_pushes_have_any_hang():
    assert hang(scatter(COPY_KERNEL, ()))
    assert not hang(scatter(COPY_KERNEL, ("copies",)))
    assert not hang(scatter(COPY_ENGINE, ()))


def test_sums_that_keep_the_next_matmul_from_its_sm_hang():
    assert hang(scatter(COPY_ENGINE, (), parts=2))
    assert not hang(scatter(COPY_ENGINE, ("main",), parts=2))


def test_accesses_that_no_launch_orders_are_seen():
    plan = scatter(COPY_ENGINE, ())
    pushes = {f"push.{rank}.0" for rank in range(2)}
    unheard = tuple(replace(one, waits=()) if one.name in pushes else one for one in plan.schedule.operations)
    assert "no launch or signal orders them" in race(replace(plan, schedule=replace(plan.schedule, operations=unheard)))


@pytest.mark.slow
def test_a_read_before_its_write_is_seen():
    plan = next(one for one in plans() if one.name == "all_gather_matmul.sequential")
    turned = tuple(sorted(plan.schedule.operations, key=lambda one: (one.rank, type(one).__name__ != "Compute")))
    assert "writes only after it" in race(replace(plan, schedule=replace(plan.schedule, operations=turned)))


@pytest.mark.slow
def test_no_wrong_plan_is_accepted():
    tallies = plan_mutations.campaign(14, seed=41)
    assert len(tallies) == len(MUTATIONS) >= 14
    for name, tally in tallies.items():
        assert tally.wrong_accepted == [], name
        assert tally.mutants == 14
    for name in ("residency_without_tiles", "premise_of_launch", *broken_plans.NEVER_RIGHT):
        assert tallies[name].wrong_refused >= 3, name
    assert sum(tally.right_accepted for tally in tallies.values()) > 30


def test_another_checkout_is_asked_what_it_thinks():
    """This checkout in a process of its own says what it says here."""
    wrong, right = scatter(COPY_KERNEL, ()), scatter(COPY_KERNEL, ("copies",))
    with OtherVerifier(Path(__file__).parents[3]) as verifier:
        assert [refusal.rule for refusal in verifier(wrong).refusals] == ["residency"]
        assert verifier(right).ok
