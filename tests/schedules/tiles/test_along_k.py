"""Tiles dealt out along k: the rows they become, and when the model takes it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.plan import MatmulConfig, Plan, split_k_obstacle
from overweave.ir.problem import Problem
from overweave.ir.tile_order import TileRow, partial_slots
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog.catalog import build
from overweave.schedules.tiles.along_k import LEAST_STEPS, is_worthwhile
from overweave.schedules.tiles.order import tile_count
from overweave.schedules.tiles.shape import BEST, HOPPER, along_k, shapes, tile_shape

TILE: dict[str, int | str] = {"kernel": "hopper", "block_m": 128, "block_n": 128, "split_n": 2}


def plan(split_k: int | str, name: str = "all_gather_matmul.push", **options: int | str) -> Plan:
    operator = name.split(".")[0]
    problem = Problem(operator=operator, m=1024, n=512, k=1000, world_size=2, dtype="bfloat16")
    return build(name, problem, {**TILE, "sms": 20, "split_k": split_k, **options})


def shared(rows: tuple[TileRow, ...]) -> list[TileRow]:
    return [row for row in rows if row.shares]


def test_the_last_tiles_of_a_table_are_dealt_out_and_nothing_else_changes():
    whole, dealt = plan(1), plan(3)
    before, after = (one.tile_order(1, "tiles").rows for one in (whole, dealt))
    assert after[:20] == before[:20]  # a wave
    assert len(before) == 32
    rows = shared(after)
    assert len(rows) == 12 * 3 == len(after) - 20
    for at, tile in enumerate(before[20:]):
        group = rows[3 * at : 3 * at + 3]
        assert [(row.k_lo, row.k_hi, row.share) for row in group] == [(0, 320, 0), (320, 640, 1), (640, 1000, 2)]
        assert {row._replace(k_lo=0, k_hi=0, share=0, shares=0, partial=0) for row in group} == {tile}
        assert {row.partial for row in group} == {3 * at}
    assert partial_slots(after) == 36
    assert dealt.schedule == whole.schedule  # a tile is announced once, however many share it
    assert verify_plan(dealt, MachineLimits()).ok
    assert tile_count(dealt.schedule, dealt.realization) == 2 * len(after)


@pytest.mark.parametrize(
    "name", ["all_gather_matmul.pull", "matmul_reduce_scatter.scatter", "matmul_all_reduce.two_shot"]
)
def test_plans_with_shares_are_proven(name: str):
    for options in ({}, {"sums": "epilogue"} if name != "all_gather_matmul.pull" else {"pieces": 3}):
        dealt = plan(4, name, **options)
        assert all(shared(order.rows) for order in dealt.tile_orders if order.queue == "tiles")
        assert verify_plan(dealt, MachineLimits()).ok


def test_a_full_last_wave_or_a_short_k_is_left_whole():
    assert not shared(plan(3, sms=16).tile_orders[0].rows)
    assert is_worthwhile(4, HOPPER[0].config, 16 * LEAST_STEPS * 16)
    assert not is_worthwhile(4, HOPPER[0].config, 64 * (4 * LEAST_STEPS - 1))
    assert not along_k(HOPPER[0].config, 3, 132, 64, 2).split_k


def test_a_kernel_that_cannot_is_refused():
    with pytest.raises(InputError, match="split_k=2"):
        plan(2, block_n=256, split_n=4)
    assert split_k_obstacle(HOPPER[1].config)
    assert not split_k_obstacle(MatmulConfig())


def test_the_model_deals_out_where_k_is_long_and_the_last_wave_small():
    hopper = shapes("bfloat16", "hopper")
    config = tile_shape((1024,), 4608, 132, hopper, 16384, may_deal=True)
    assert config.split_k > 1
    assert config.split_tiles == -(-1024 // config.block_m) * -(-4608 // config.block_n) % 132
    assert not tile_shape((1024,), 4096, 132, hopper, 1024, may_deal=True).split_k  # one full wave, and short
    assert not tile_shape((1024,), 4608, 132, hopper, 16384).split_k
    assert along_k(replace(config, split_k=7), 144, 132, 16384, BEST).split_k > 1
