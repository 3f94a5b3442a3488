"""Tiles that store at peers: proven, refuted without any one wait; and back ends that cannot be, with the reason."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from campaigns.oracle.fewer_waits import without_one_emitted_wait, without_one_wait
from overweave.errors import InputError
from overweave.ir.schedule import Apply, Put, Reduce
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.moves.moves import MOVERS
from overweave.schedules.weave.author_plan import author_plan
from overweave.schedules.weave.transports import legal, obstacle, transports, wanted_of
from tests.plans import rules, with_operations
from tests.tile_spaces import BLOCK, matmul

SCATTER = "reduce_scatter.scatter mover=tiles pieces=2"
ONE_SHOT = "all_reduce.one_shot mover=tiles"


@pytest.mark.slow
@pytest.mark.parametrize("mover", ["copy_kernel", "bulk_kernel", "tiles"])
def test_whole_partials_may_be_carried_by_others_than_the_copy_engine(mover: str):
    plan = author_plan(matmul(100, k=64), {"C": f"all_reduce.one_shot mover={mover}"}, 3, "bfloat16")
    assert not rules(plan)
    assert any(isinstance(one, Put) for one in plan.schedule.operations) == (mover != "tiles")
    broken = [*without_one_wait(plan), *without_one_emitted_wait(plan)]
    assert all(map(rules, broken))
    assert broken


def test_a_tile_that_is_stored_at_every_peer_tells_all_the_same_signal():
    plan = author_plan(matmul(64), {"C": ONE_SHOT}, 4, "bfloat16")
    applies = [one for one in plan.schedule.of_rank(0) if isinstance(one, Apply)]
    assert {(notify.rank, notify.signal) for one in applies for notify in one.notifies} == {(1, 0), (2, 0), (3, 0)}
    (waits,) = (one.waits for one in plan.schedule.of_rank(0) if isinstance(one, Reduce))
    assert waits[0].count == 3 * sum(one.instances for one in applies)


def test_no_put_is_left_and_sums_wait_for_all_tiles_of_peers():
    plan = author_plan(matmul(64), {"C": "reduce_scatter.scatter mover=tiles"}, 2, "bfloat16")
    assert not any(isinstance(one, Put) for one in plan.schedule.operations)
    stored = [one for one in plan.schedule.of_rank(0) if isinstance(one, Apply) and one.makes[0].region.rank == 1]
    told = {notify.rank for one in stored for notify in one.notifies}
    counts = {wait.count for one in plan.schedule.of_rank(1) if isinstance(one, Reduce) for wait in one.waits}
    assert told == {1}
    assert stored[0].instances in counts


def test_pieces_of_unequally_many_tiles_are_counted_apart():
    """A sum waits for the piece that it reads alone, so that a row of a table can say its count."""
    uneven = matmul(3 * BLOCK * 2)
    for words in (SCATTER, f"{SCATTER.replace('pieces=2', 'pieces=1')} own_pieces=1"):
        plan = author_plan(uneven, {"C": words}, 2, "bfloat16")
        verify_plan(plan, MachineLimits()).raise_if_refused()


def test_a_tile_that_tells_another_than_it_stores_at_is_refuted():
    plan = author_plan(matmul(96), {"C": "reduce_scatter.scatter mover=tiles"}, 3, "bfloat16")
    operations = list(plan.schedule.operations)
    at = next(i for i, one in enumerate(operations) if isinstance(one, Apply) and one.makes[0].region.rank != one.rank)
    apply = operations[at]
    assert isinstance(apply, Apply)
    made = tuple(replace(one, region=replace(one.region, rank=apply.rank)) for one in apply.makes)
    operations[at] = replace(apply, makes=made)
    assert rules(with_operations(plan, operations))


@pytest.mark.parametrize(
    "name", [name for name, transport in transports().items() if "mover" in str(transport.options)]
)
def test_every_back_end_is_planned_or_refused_with_its_reason(name: str):
    transport = transports()[name]
    tensor = "A" if transport.side == "gather" else "C"
    for mover in MOVERS:
        words, found = f"{name} mover={mover}", obstacle(name, mover)
        assert (mover in legal(name)) == (not found)
        if found:
            with pytest.raises(InputError, match=found[:40]):
                wanted_of(["A"], ["C"], {tensor: words})
        else:
            plan = author_plan(matmul(128, n=64, k=64), {tensor: words}, 2, "bfloat16", dual_source="A")
            verify_plan(plan, MachineLimits()).raise_if_refused()
