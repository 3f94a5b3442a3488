"""What verify asks of a plan whose chunks a kernel moves, each rule provoked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from overweave.ir.plan import COPY_ENGINE, COPY_KERNEL, EngineAssignment, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Copy, Put
from overweave.ir.tile_order import TileRow
from overweave.ir.verify.engines.stores import check_copy
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.ir.verify.rules.verdict import Findings
from overweave.schedules.catalog.catalog import build
from overweave.schedules.tiles.order import tile_orders
from tests.plans import changed, plan_of, refused, with_operations

H200 = MachineLimits()
PUSH, SCATTER = "all_gather_matmul.push", "matmul_reduce_scatter.scatter"


def made(name: str, m: int = 100, n: int = 40, world_size: int = 3, **options: int | str) -> Plan:
    small = {"block_m": 16, "block_n": 16, "pieces": 2, "mover": "copy_kernel", "copy_programs": 2}
    return plan_of(name, small | options, m=m, n=n, k=512, world_size=world_size)


def with_rows(plan: Plan, change: Callable[[list[TileRow]], object]) -> Plan:
    """Rank 0's table of pushes changed."""
    orders = list(plan.tile_orders)
    at = next(
        at for at, order in enumerate(orders) if (order.rank, order.queue) in ((0, "copies"), (0, "copies.kernel"))
    )
    rows = list(orders[at].rows)
    change(rows)
    orders[at] = replace(orders[at], rows=tuple(rows))
    return replace(plan, tile_orders=tuple(orders))


def replaced(row: TileRow) -> Callable[[list[TileRow]], None]:
    """The second row becomes another."""

    def change(rows: list[TileRow]) -> None:
        rows[1] = row

    return change


@pytest.mark.slow
@pytest.mark.parametrize("name", [PUSH, SCATTER])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_both_plans_are_proven(name: str, world_size: int):
    for m in (0, 1, 5, 100, 4000):
        for options in ({}, {"order": "all_peers"}, {"sms": 16}, {"pieces": 1, "sms": 1}):
            verdict = verify_plan(made(name, m, world_size=world_size, **options), H200)
            assert verdict.ok, [str(refusal) for refusal in verdict.refusals]


@pytest.mark.parametrize("field", [*TileRow._fields])
@pytest.mark.parametrize("name", [PUSH, SCATTER])
def test_every_change_of_a_row_is_refused(name: str, field: str):
    plan = made(name, sms=1)
    rows = next(order.rows for order in plan.tile_orders if order.queue.startswith("copies"))
    is_told = field not in ("wait_lo", "wait_hi", "wait_count", "also_count") or rows[1].wait_lo < rows[1].wait_hi
    for by in (1, 64) if is_told and field != "also_count" else ():
        wrong = rows[1]._replace(**{field: getattr(rows[1], field) + by})
        changed = with_rows(plan, replaced(wrong))
        assert {refusal.rule for refusal in verify_plan(changed, H200).refusals} == {"lowering"}, (field, by)


@pytest.mark.parametrize(
    "change", [lambda rows: rows.pop(), lambda rows: rows.append(rows[-1]), lambda rows: rows.reverse()]
)
def test_a_tile_lost_or_moved_twice_or_out_of_turn_is_refused(change: Callable[[list[TileRow]], object]):
    refused(with_rows(made(PUSH), change), "lowering", "")


def test_a_chunk_may_be_larger_than_a_tile_may_move():
    wide = Problem(operator="all_gather_matmul", m=16384, n=128, k=131072, world_size=2, dtype="bfloat16")
    chunks = build(PUSH, wide, {"mover": "copy_kernel", "pieces": 1}, rank=0)
    verdict = verify_plan(chunks, H200, rank=0)
    assert verdict.ok, [str(refusal) for refusal in verdict.refusals]
    put = next(each for each in chunks.schedule.operations if isinstance(each, Put))
    findings, buffers = Findings(), {buffer.name: buffer for buffer in chunks.schedule.buffers}
    check_copy(replace(put, tiles=1), [], buffers, "bfloat16", findings)
    assert "more than 31 bits" in str(findings.verdict("push").refusals)


def test_rows_that_are_no_whole_words_are_refused():
    """Of the weight only its own layout says whether bulk loads can take it."""
    problem = Problem(
        operator="matmul_reduce_scatter", m=100, n=44, k=512, world_size=2, dtype="bfloat16", b_is_transposed=True
    )
    for mover, is_ok in (("copy_engine", True), ("copy_kernel", False)):
        plan = build(SCATTER, problem, {"mover": mover})
        assert verify_plan(plan, H200).ok == is_ok
    refused(plan, "alignment", "words of 16")


def test_a_copy_engine_moves_a_chunk_at_once():
    plan = made(PUSH, m=1000)
    engines = tuple(
        EngineAssignment(one.queue, COPY_ENGINE) if one.engine == COPY_KERNEL else one
        for one in plan.realization.engines
    )
    moved = replace(plan, realization=replace(plan.realization, engines=engines))
    refused(moved, "engine", "instances")


def test_a_kernel_without_a_configuration_is_refused():
    plan = made(PUSH)
    refused(replace(plan, realization=replace(plan.realization, copy=None)), "engine", "no configuration")


def test_two_kernels_of_a_kind_are_refused():
    plan = made(PUSH)
    other = replace(plan.schedule.queues[-1], name="more")
    schedule = replace(plan.schedule, queues=(*plan.schedule.queues, other))
    engines = (*plan.realization.engines, EngineAssignment("more", COPY_KERNEL))
    refused(replace(plan, schedule=schedule, realization=replace(plan.realization, engines=engines)), "engine", "two")


def test_a_local_copy_is_none_of_its_tiles():
    plan = made(PUSH, m=7)
    idle = Copy(name="idle", rank=0, queue="copies.kernel", sources=(), destinations=(), delay_us=5)
    late = (*plan.schedule.operations, idle)
    refused(with_operations(plan, late), "engine", "copies to peers")


def test_pushes_that_wait_for_tiles_beside_them_must_leave_those_room():
    refused(made(SCATTER, m=4000, copy_programs=8, sms=8), "residency", "none to tiles", limits=MachineLimits(sms=8))
    assert verify_plan(made(SCATTER, copy_programs=8), MachineLimits(sms=8)).ok  # one wave: behind the tiles
    assert verify_plan(made(PUSH, m=4000, copy_programs=8), MachineLimits(sms=8)).ok  # done before the tiles start


def test_pushes_launched_ahead_of_the_tiles_they_wait_for_are_refused():
    plan = made(SCATTER, sms=1)
    ahead = sorted(plan.schedule.operations, key=lambda each: (each.rank, not isinstance(each, Put)))
    turned = with_operations(plan, ahead)
    assert not verify_plan(replace(turned, tile_orders=tile_orders(turned.schedule, turned.realization)), H200).ok


def test_a_count_of_chunks_in_place_of_tiles_is_refused():
    plan = made(PUSH, m=1000)
    refused(changed(plan, lambda put: replace(put, tiles=put.tiles + 1), Put), "signal", "arrived")
