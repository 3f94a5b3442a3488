"""What verify says of tiles that store at peers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.problem import Problem
from overweave.ir.schedule import Buffer, Compute
from overweave.ir.tile_order import ALL_RANKS, MULTIPLY
from overweave.ir.verify.engines.stores import check_stores
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.ir.verify.rules.verdict import Findings
from overweave.schedules.catalog.catalog import build
from tests.plans import changed, refusals, with_rows

SCATTERED = Problem(operator="matmul_reduce_scatter", m=300, n=40, k=32, world_size=3, dtype="bfloat16")
REDUCED = replace(SCATTERED, operator="matmul_all_reduce")
PLANS = {SCATTERED: "matmul_reduce_scatter.scatter_stored", REDUCED: "matmul_all_reduce.ring_stored"}
NAMES = (
    (SCATTERED, "scatter_stored"),
    (SCATTERED, "ring_stored"),
    (REDUCED, "ring_stored"),
)


@pytest.mark.parametrize(("problem", "name"), NAMES)
@pytest.mark.parametrize("options", [{}, {"order": "all_peers"}, {"pieces": 3}, {"kernel": "hopper", "sms": 8}])
def test_what_is_built_is_proven(problem: Problem, name: str, options: dict[str, str | int]):
    if name == "ring_stored" and "order" in options:
        with pytest.raises(InputError, match="order"):
            build(f"{problem.operator}.{name}", problem, options)
        return
    for other in (
        problem,
        *(replace(problem, m=m) for m in (0, 1, 2)),
        *(replace(problem, world_size=w) for w in (2, 8)),
    ):
        plan = build(f"{problem.operator}.{name}", other, options)
        assert verify_plan(plan, MachineLimits()).refusals == (), other


@pytest.mark.parametrize("problem", PLANS, ids=PLANS.get)
@pytest.mark.parametrize("to", [0, 1, 2, ALL_RANKS])
def test_a_tile_that_stores_elsewhere_than_its_operation_is_refused(problem: Problem, to: int):
    plan = build(PLANS[problem], problem, {})
    wrong = with_rows(plan, lambda row: row._replace(to=to) if row.kind == MULTIPLY else row)
    assert "at another rank" in refusals(wrong)


def test_a_tile_that_multiplies_nothing_stores_at_its_own_rank():
    plan = build(PLANS[REDUCED], REDUCED, {})
    wrong = with_rows(plan, lambda row: row if row.kind == MULTIPLY else row._replace(to=1))
    assert "multiplies nothing" in refusals(wrong)


def test_a_sum_that_a_rank_does_not_get_is_refused():
    plan = build(PLANS[REDUCED], REDUCED, {})
    lacking = changed(plan, lambda each: replace(each, copies=each.copies[1:]), Compute)
    assert "no input or operation writes it" in refusals(lacking)


def test_sums_of_several_addends_go_to_one_rank():
    """They are stored from registers, for which peers are too far."""
    plan, findings = build(PLANS[REDUCED], REDUCED, {}), Findings()
    spread = next(each for each in plan.schedule.operations if isinstance(each, Compute) and each.copies)
    check_stores(replace(spread, addends=spread.addends * 2), [], 3, findings)
    assert "a sum of one addend at one or at every rank" in str(findings.refusals)


def test_a_sum_that_lands_elsewhere_on_a_peer_is_refused():
    plan = build(PLANS[REDUCED], REDUCED, {})

    def moved(each: Compute) -> Compute:
        return replace(each, copies=tuple(replace(copy, rows=(0, copy.rows[1] - copy.rows[0])) for copy in each.copies))

    assert "not in the same place" in refusals(changed(plan, moved, Compute))


def test_a_sum_that_goes_to_two_buffers_is_refused():
    """A kernel has one place at peers for sums that it stores at every rank."""
    plan = build(PLANS[REDUCED], REDUCED, {})

    def torn(each: Compute) -> Compute:
        first, *rest = each.copies
        return replace(each, copies=(replace(first, buffer="slots"), *rest))

    assert "in several buffers" in refusals(changed(plan, lambda each: torn(each) if each.copies else each, Compute))


def test_whoever_stores_at_every_rank_tells_the_peers_alone():
    """Nobody waits for it here, so a count here would stay in a signal that none has asked for."""
    plan = build(PLANS[REDUCED], REDUCED, {})

    def told(each: Compute) -> Compute:
        own = replace(each.notifies[0], rank=each.rank)
        return replace(each, notifies=(*each.notifies, own)) if each.copies else each

    assert "for which no operation" in refusals(changed(plan, told, Compute))


def test_nobody_stores_in_a_peers_local_memory():
    plan = build(PLANS[SCATTERED], SCATTERED, {})

    def as_local(buffer: Buffer) -> Buffer:
        return replace(buffer, home="local") if buffer.home == "symmetric" else buffer

    local = replace(plan.schedule, buffers=tuple(map(as_local, plan.schedule.buffers)))
    assert "a local buffer is its own rank's only" in refusals(replace(plan, schedule=local))


def test_what_lies_on_a_peer_is_not_added_to():
    plan = build(PLANS[SCATTERED], SCATTERED, {})
    adding = changed(plan, lambda each: each if each.addends else replace(each, accumulate=True), Compute)
    assert "adds to what lies on a peer" in refusals(adding)


def test_more_peers_than_a_kernel_has_maps_for_are_refused():
    assert "7 peers at most" in refusals(build(PLANS[SCATTERED], replace(SCATTERED, world_size=9), {}))


def test_a_library_stores_at_its_own_rank():
    plan = build(PLANS[SCATTERED], replace(SCATTERED, m=100), {"pieces": 1})
    engines = tuple(replace(one, engine="library") for one in plan.realization.engines)
    queues = tuple(replace(queue, order="complete") for queue in plan.schedule.queues)
    schedule, realization = replace(plan.schedule, queues=queues), replace(plan.realization, engines=engines)
    assert "own rank's memory only" in refusals(replace(plan, schedule=schedule, realization=realization))


def test_a_signal_that_counts_tiles_of_several_ranks_is_waited_for_in_full():
    plan = build(PLANS[SCATTERED], SCATTERED, {"pieces": 1, "block_m": 16, "block_n": 16})
    own = [each for each in plan.schedule.operations if isinstance(each, Compute) and each.late_waits]
    stored = [each for each in plan.schedule.operations if isinstance(each, Compute) and each.out[0].rank == 0]
    counts = sum(each.tiles for each in stored if each.rank != 0)
    assert [wait.count for each in own if each.rank == 0 for wait in each.late_waits] == [counts]
    few = changed(
        plan, lambda each: replace(each, late_waits=tuple(replace(w, count=1) for w in each.late_waits)), Compute
    )
    assert not verify_plan(few, MachineLimits()).ok
