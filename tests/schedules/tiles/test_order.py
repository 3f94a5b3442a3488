"""Tile tables: every element once, in groups, with the duties of its operation."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Notify, Schedule, Wait
from overweave.ir.tile_order import NO_SIGNAL
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog.catalog import build
from overweave.schedules.tiles.order import tile_count, tile_orders
from tests.clock import ends_within

TILES = {"block_m": 16, "block_n": 32, "group_m": 2}


def plan(name: str, m: int = 100, **options: int | str) -> Plan:
    problem = Problem(operator=name.split(".")[0], m=m, n=50, k=8, world_size=2, dtype="bfloat16")
    return build(name, problem, {**TILES, "pieces": 2, **options})


def cut_plan(sms: int, n: int, block_n: int = 128, split_n: int = 2, block_m: int = 16) -> Plan:
    problem = Problem(operator="all_gather_matmul", m=6 * block_m, n=n, k=8, world_size=2, dtype="bfloat16")
    tile = {"block_m": block_m, "block_n": block_n, "group_m": 2, "split_n": split_n, "sms": sms}
    return build("all_gather_matmul.push", problem, {**tile, "kernel": "hopper" if block_m >= 64 else "portable"})


def test_tiles_of_the_last_wave_are_cut():
    plan = cut_plan(sms=8, n=256)
    rows = plan.tile_order(0, "tiles").rows
    # 12 tiles are a wave of 8 and 4 more, which become 8 halves.
    assert [row.width for row in rows] == [0] * 8 + [64] * 8
    assert [(row.row, row.col) for row in rows[-4:]] == [(64, 128), (64, 192), (80, 128), (80, 192)]
    covered = [(row.row, col) for row in rows for col in range(row.col, row.col + (row.width or 128), 64)]
    assert sorted(covered) == [(row, col) for row in range(0, 96, 16) for col in range(0, 256, 64)]
    assert sum(op.instances for op in plan.schedule.of_rank(0) if op.queue == "tiles") == len(rows)
    assert tile_count(plan.schedule, plan.realization) == 2 * len(rows)


def test_a_last_column_that_half_a_tile_holds_has_half_tiles():
    rows = cut_plan(sms=12, n=168).tile_order(0, "tiles").rows
    assert {(row.col, row.width) for row in rows[:6]} == {(0, 0), (128, 64)}
    assert {(row.col, row.width) for row in cut_plan(sms=12, n=200).tile_order(0, "tiles").rows} == {(0, 0), (128, 0)}


@pytest.mark.parametrize(
    ("tile", "n", "sms", "widths"),
    [
        ((256, 4), 400, 12, {0: 6, 192: 6}),  # one wave: as many columns as there are
        ((256, 4), 512, 10, {0: 10, 64: 8}),  # two tiles are left: eight quarters
        ((256, 4), 512, 9, {0: 12}),  # three tiles are left: twelve quarters would take two rounds
        ((256, 4), 304, 9, {0: 4, 64: 14}),
        ((192, 3), 384, 9, {0: 9, 64: 9}),
        ((192, 3), 320, 6, {0: 6, 128: 6}),  # what is left fills a wave
    ],
)
def test_tiles_of_three_and_four_rectangles(tile: tuple[int, int], n: int, sms: int, widths: dict[int, int]):
    plan = cut_plan(sms, n, *tile, block_m=128)
    rows = plan.tile_order(1, "tiles").rows
    assert dict(Counter(row.width for row in rows)) == widths
    covered = [(row.row, col) for row in rows for col in range(row.col, min(row.col + (row.width or tile[0]), n), 4)]
    assert sorted(covered) == [(row, col) for row in range(0, 768, 128) for col in range(0, n, 4)]
    assert sum(op.instances for op in plan.schedule.of_rank(1) if op.queue == "tiles") == len(rows)
    assert verify_plan(plan, MachineLimits()).ok


def test_narrow_tiles_of_the_last_wave_come_before_the_parts_of_cut_ones():
    rows = cut_plan(sms=8, n=700, block_n=256, split_n=4, block_m=128).tile_order(0, "tiles").rows
    widths = [row.width for row in rows]
    assert widths == sorted(widths, key=lambda width: width == 64)
    assert set(widths) == {0, 192, 64}


def test_one_own_part_is_summed_behind_the_tiles():
    """The kernel boundary says that they are finished, and the peer's last piece that its others have arrived."""
    sums = plan("matmul_reduce_scatter.scatter", own_pieces=1).tile_order(1, "sums").rows
    assert {(*tile[6:9], tile.also) for tile in sums} == {(2, 3, 1, NO_SIGNAL)}


def test_the_count_is_known_without_the_tables():
    both = plan("matmul_reduce_scatter.scatter", m=333)
    assert tile_count(both.schedule, both.realization) == sum(len(order.rows) for order in both.tile_orders)


def with_compute(schedule: Schedule, **changes: object) -> Schedule:
    changed = (replace(op, **changes) if op.name == "multiply.0-1.0" else op for op in schedule.operations)
    return replace(schedule, operations=tuple(changed))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"waits": (Wait("arrived", (2, 4), 1), Wait("arrived", (0, 2), 1))}, "more than a range and one signal"),
        ({"notifies": (Notify("arrived", 0, 0), Notify("arrived", 0, 1))}, "signals twice"),
        ({"notifies": (Notify("arrived", 1, 0),)}, "signals a peer"),
        ({"out": ()}, "differ"),
    ],
)
def test_what_a_table_cannot_say_is_refused(changes: dict[str, object], found: str):
    good = plan("all_gather_matmul.push")
    with pytest.raises(ScheduleError, match=found):
        tile_orders(with_compute(good.schedule, **changes), good.realization)


def test_a_copy_is_none_of_a_kernels_tiles():
    good = plan("all_gather_matmul.push")
    moved = (replace(op, queue="tiles") if op.name == "push.0-1.0" else op for op in good.schedule.operations)
    with pytest.raises(ScheduleError, match=r"push\.0-1\.0 is none of its tiles"):
        tile_orders(replace(good.schedule, operations=tuple(moved)), good.realization)


@pytest.mark.slow
def test_a_large_table_takes_milliseconds():
    problem = Problem(operator="all_gather_matmul", m=160_000, n=4096, k=4096, world_size=4, dtype="bfloat16")
    assert len(build("all_gather_matmul.push", problem, {}, rank=0).tile_orders[0].rows) > 20_000
    ends_within(0.06, lambda: build("all_gather_matmul.push", problem, {}, rank=0).tile_orders)
