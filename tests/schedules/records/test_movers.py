"""What a kernel that carries Puts changes in a schedule: tiles, counts, queues, and what runs behind what."""

from __future__ import annotations

import pytest

from overweave.ir.plan import COPY_ENGINE, COPY_KERNEL, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Compute, Copy, Put, Reduce
from overweave.ir.shards import tile_parts
from overweave.schedules.catalog.catalog import build
from overweave.schedules.communication import PUSHES
from overweave.schedules.records.movers import LEAST_TILE_BYTES, MOST_TILE_BYTES

KERNEL = {"mover": "copy_kernel", "copy_programs": 4}


def plan_of(name: str, m: int, world_size: int = 3, options: dict[str, str | int] | None = None) -> Plan:
    problem = Problem(operator=name.split(".")[0], m=m, n=2048, k=2048, world_size=world_size, dtype="bfloat16")
    return build(name, problem, KERNEL | (options or {}))


def test_the_parts_of_a_chunk_are_equal_but_for_the_last_and_cover_it():
    assert tile_parts((10, 20), 3) == ((10, 14), (14, 18), (18, 20))
    assert tile_parts((0, 2), 4) == ((0, 1), (1, 2), (2, 2), (2, 2))
    assert tile_parts((5, 5), 2) == ((5, 5), (5, 5))


@pytest.mark.parametrize("order", ["ring", "all_peers"])
@pytest.mark.parametrize("name", ["all_gather_matmul.push", "matmul_reduce_scatter.scatter"])
def test_all_puts_of_a_plan_have_as_many_tiles_in_one_queue(name: str, order: str):
    plan = plan_of(name, 1000, options={"order": order, "pieces": 2})
    puts = [operation for operation in plan.schedule.operations if isinstance(operation, Put)]
    (tiles,) = {put.tiles for put in puts}
    assert tiles > 1
    (queue,) = {put.queue for put in puts}
    assert plan.realization.engine_of(queue) == COPY_KERNEL
    assert {len(plan.tile_order(rank, queue).rows) for rank in range(3)} == {4 * tiles}


@pytest.mark.parametrize("name", ["all_gather_matmul.push", "matmul_reduce_scatter.scatter"])
def test_arrivals_are_counted_in_tiles(name: str):
    schedule = plan_of(name, 1000).schedule
    tiles = {put.tiles for put in schedule.operations if isinstance(put, Put)}
    waits = [wait for operation in schedule.operations for wait in operation.waits if wait.pad == "arrived"]
    assert waits
    assert {wait.count for wait in waits} == tiles


def test_a_tile_is_neither_too_small_for_its_release_nor_too_large_to_share_out():
    for m in (3, 48, 300, 3000, 30000):
        puts = [put for put in plan_of("all_gather_matmul.push", m).schedule.operations if isinstance(put, Put)]
        rows = max(put.sources[0].shape[0] for put in puts)
        tile_bytes = -(-rows // puts[0].tiles) * 2048 * 2
        assert tile_bytes <= MOST_TILE_BYTES
        assert puts[0].tiles == 1 or tile_bytes > LEAST_TILE_BYTES // 2


def test_pushes_that_wait_for_nothing_come_first_and_beside_the_tiles():
    plan = plan_of("all_gather_matmul.push", 1000)
    assert isinstance(next(plan.schedule.of_rank(0)), Put)
    assert plan.sms_beside == 0  # they have their SMs before the tiles start


def test_pushes_of_one_wave_stand_behind_the_tile_kernel_and_those_of_more_beside_it():
    short, long = (plan_of("matmul_reduce_scatter.scatter", 1000, options={"sms": sms}) for sms in (132, 8))
    assert [plan.sms_beside for plan in (short, long)] == [0, 4]
    after = [{queue.name: queue.after for queue in plan.schedule.queues} for plan in (short, long)]
    assert [queues[PUSHES] for queues in after] == [("tiles",), ()]
    # Sums that wait for peers hold SMs: the own pushes must be done by then.
    assert [queues["sums"] for queues in after] == [("tiles", PUSHES)] * 2


def test_waits_that_a_kernel_boundary_implies_are_not_in_the_table():
    short, long = (plan_of("matmul_reduce_scatter.scatter", 1000, options={"sms": sms}) for sms in (132, 8))
    waiting = [[row.wait_lo < row.wait_hi for row in plan.tile_order(0, PUSHES).rows] for plan in (short, long)]
    assert not any(waiting[0])
    assert all(waiting[1])


def test_the_scatter_puts_stand_behind_all_tiles_even_where_the_first_chunk_is_empty():
    for rank in range(2):
        operations = list(plan_of("matmul_reduce_scatter.scatter", 1, 2, {"pieces": 2}).schedule.of_rank(rank))
        kinds = [type(operation) for operation in operations if not isinstance(operation, Copy | Reduce)]
        assert kinds == sorted(kinds, key=[Compute, Put].index)


def test_the_copy_engine_is_left_as_it_was():
    plan = plan_of("all_gather_matmul.push", 1000, options={"mover": "copy_engine"})
    assert plan.realization.engine_of("copies") == COPY_ENGINE
    assert plan.realization.copy is None
    assert {put.tiles for put in plan.schedule.operations if isinstance(put, Put)} == {1}
    assert plan.sms_beside == 0
