"""Puts that tiles carry: proven on any ranks, refuted if a tile claims less than it must or waits before it sends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from overweave.errors import InputError, OverweaveError
from overweave.ir.plan import Plan
from overweave.ir.schedule import Apply, Put, Wait
from overweave.ir.text.files import from_json, to_json
from overweave.ir.tile_order import APPLY, COPY
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.ir.verify.rules.author_tables import check_slices
from overweave.ir.verify.rules.verdict import Findings
from overweave.schedules.weave.author_plan import author_plan
from overweave.schedules.weave.exchange import LEAST_SLICE
from tests.schedules.weave.test_weave import BLOCK, SCATTER, attention, matmul

BY_TILES, IN_BULK = "all_gather.push mover=tiles pieces=2", "all_gather.push mover=bulk_tiles order=all_peers"
RECEIVE = "all_to_all.receive mover=tiles"
WIDE = 4096  # elements of a row, so that a slice is a few rows


def plans(world_size: int) -> Iterator[Plan]:
    whole, ragged = matmul(2 * BLOCK * world_size, k=WIDE), matmul(100, k=WIDE)
    for space in (whole, ragged):
        for chosen in (None, "A"):
            yield author_plan(space, {"A": BY_TILES}, world_size, "bfloat16", chosen=chosen)
    yield author_plan(whole, {"A": IN_BULK, "C": SCATTER}, world_size, "bfloat16", chosen="A")
    yield author_plan(whole, {"A": BY_TILES, "B": "all_gather.collective"}, world_size, "bfloat16", chosen="A")
    yield author_plan(whole, {"A": RECEIVE, "C": "all_to_all.send"}, world_size, "bfloat16", chosen="A")
    long = attention(2 * BLOCK * world_size, width=WIDE)
    yield author_plan(long, {"K": BY_TILES, "V": BY_TILES}, world_size, "bfloat16")


def refusals(plan: Plan) -> set[str]:
    return {refusal.rule for refusal in verify_plan(plan, MachineLimits()).refusals}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_plan_is_proven_and_is_data(world_size: int):
    for plan in plans(world_size):
        verify_plan(plan, MachineLimits()).raise_if_refused()
        assert from_json(to_json(plan)) == plan


def test_slices_are_counted_and_belong_to_the_queue_of_the_tiles():
    plan = author_plan(matmul(128, k=WIDE), {"A": BY_TILES}, 2, "bfloat16", chosen="A")
    puts = [one for one in plan.schedule.of_rank(0) if isinstance(one, Put)]
    rows = plan.tile_order(0, "tiles").rows
    assert {put.queue for put in puts} == {"tiles"}
    assert sum(put.instances for put in puts) == sum(row.kind == COPY for row in rows) > len(puts)
    waits: list[Wait] = [wait for one in plan.schedule.of_rank(1) if isinstance(one, Apply) for wait in one.waits]
    assert {wait.count for wait in waits} == {puts[0].instances}
    assert all((row.row_end - row.row) * WIDE >= LEAST_SLICE for row in rows if row.kind == COPY)
    verify_plan(plan, MachineLimits()).raise_if_refused()


def test_whoever_waits_has_claimed_what_peers_wait_for_alike():
    plan = author_plan(matmul(128, k=WIDE), {"A": BY_TILES}, 4, "bfloat16", chosen="A")
    rows = [row for row in plan.tile_order(1, "tiles").rows if row.kind == APPLY]
    count = sum(row.kind == COPY for row in plan.tile_order(1, "tiles").rows)
    own = [row for row in rows if row.wait_lo == row.wait_hi]
    assert {(row.col, row.width) for row in own} == {(0, 1)}  # each moves one slice and waits for nothing
    claimed = [row.col for row in rows[:count]]
    assert claimed == sorted(claimed)
    assert not any(row.width for row in rows[count:])


def changed_row(plan: Plan, at: int, **fields: int) -> Plan:
    order = plan.tile_orders[0]
    rows = (*order.rows[:at], order.rows[at]._replace(**fields), *order.rows[at + 1 :])
    return replace(plan, tile_orders=(replace(order, rows=rows), *plan.tile_orders[1:]))


def test_a_table_that_moves_otherwise_is_refuted():
    plan = author_plan(matmul(128, k=WIDE), {"A": BY_TILES}, 4, "bfloat16", chosen="A")
    rows = plan.tile_orders[0].rows
    waiting = next(at for at, row in enumerate(rows) if row.wait_lo < row.wait_hi and row.width)
    last = len(rows) - 1
    assert not refusals(plan)
    assert refusals(changed_row(plan, waiting, col=0)) == {"lowering"}
    assert refusals(changed_row(plan, 0, width=0)) == {"lowering"}
    assert refusals(changed_row(plan, last, row_end=rows[last].row_end - 1)) == {"lowering"}
    assert refusals(changed_row(plan, last, signal=0)) == {"lowering"}
    order = plan.tile_orders[0]
    short = replace(plan, tile_orders=(replace(order, rows=rows[:-1]), *plan.tile_orders[1:]))
    assert "lowering" in refusals(short)


def test_ranks_that_wait_before_they_send_hang():
    plan = author_plan(matmul(128, k=WIDE), {"A": BY_TILES}, 2, "bfloat16", chosen="A")
    applies = [one for one in plan.schedule.operations if isinstance(one, Apply)]
    puts = [one for one in plan.schedule.operations if isinstance(one, Put)]
    assert refusals(replace(plan, schedule=replace(plan.schedule, operations=(*applies, *puts)))) == {"deadlock"}


def test_what_tiles_carry_waits_for_nothing():
    plan = author_plan(matmul(128, k=WIDE), {"A": BY_TILES}, 2, "bfloat16", chosen="A")
    waits = next(one.waits for one in plan.schedule.of_rank(0) if isinstance(one, Apply) and one.waits)
    last = [one for one in plan.schedule.of_rank(0) if isinstance(one, Put)][-1]
    late = replace(last, waits=waits)
    operations = tuple(late if one is last else one for one in plan.schedule.operations)
    assert refusals(replace(plan, schedule=replace(plan.schedule, operations=operations))) & {"engine", "deadlock"}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"A": RECEIVE}, "no pointer"),
        ({"A": BY_TILES, "B": "all_gather.push mover=bulk_tiles"}, "bulk_tiles and tiles"),
        ({"A": "all_gather.push mover=copy_kernel", "B": "all_gather.push mover=bulk_kernel"}, "in bulk"),
        ({"A": "all_gather.push mover=copy_kernel", "B": "all_gather.push mover=copy_kernel"}, "it has one source"),
        ({"A": "all_gather.pull mover=tiles"}, "mover"),
    ],
)
def test_what_tiles_cannot_carry_is_refused(wanted: dict[str, str], found: str):
    with pytest.raises(OverweaveError, match=found):
        author_plan(matmul(128, n=128), wanted, 2, "bfloat16")


def test_rows_that_are_no_words_are_refused():
    with pytest.raises(InputError, match="72 bytes, and kernels move words of 16"):
        author_plan(matmul(128, k=36), {"A": BY_TILES}, 2, "bfloat16", chosen="A")
    wide = author_plan(matmul(128, k=36), {"A": BY_TILES}, 2, "float32", chosen="A")
    problem, realization = (replace(part, dtype="bfloat16") for part in (wide.problem, wide.realization))
    assert refusals(replace(wide, problem=problem, realization=realization)) == {"alignment"}


def test_slices_that_no_tile_claims_are_refused():
    """Each tile claims one at least: of more than there are tiles, behind the last of them, nobody moves the rest."""
    tile = next(row for row in _plan().tile_order(0, "tiles").rows if row.kind == APPLY)
    for tiles, before, count, claimed in ((3, 0, 4, 3), (2, 4, 5, 4), (0, 0, 1, 0)):
        rows = [tile._replace(operation=0, col=before, width=1)] * tiles
        findings = Findings()
        check_slices(rows, {0: before}, count, findings)
        assert [f"claim {claimed} of {count} slices" in one.message for one in findings.refusals] == [True]
        check_slices(rows, {0: before}, claimed, findings)
        assert len(findings.refusals) == 1


def _plan() -> Plan:
    return author_plan(matmul(128, k=WIDE), {"A": BY_TILES}, 2, "bfloat16", chosen="A")
