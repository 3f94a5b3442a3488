"""What a kernel that carries Puts changes in a schedule: tiles, counts, queues, and what runs behind what."""

from __future__ import annotations

from overweave.ir.schedule import Put
from overweave.ir.shards import tile_parts
from overweave.schedules.communication import PUSHES
from overweave.schedules.records.movers import LEAST_TILE_BYTES, MOST_TILE_BYTES
from tests.plans import plan_of

KERNEL = {"mover": "copy_kernel", "copy_programs": 4}
WIDE = {"n": 2048, "k": 2048}


def test_the_parts_of_a_chunk_are_equal_but_for_the_last_and_cover_it():
    assert tile_parts((10, 20), 3) == ((10, 14), (14, 18), (18, 20))
    assert tile_parts((0, 2), 4) == ((0, 1), (1, 2), (2, 2), (2, 2))
    assert tile_parts((5, 5), 2) == ((5, 5), (5, 5))


def test_a_tile_is_neither_too_small_for_its_release_nor_too_large_to_share_out():
    for m in (3, 48, 300, 3000, 30000):
        puts = [
            put
            for put in plan_of("all_gather_matmul.push", KERNEL, m=m, **WIDE).schedule.operations
            if isinstance(put, Put)
        ]
        rows = max(put.sources[0].shape[0] for put in puts)
        tile_bytes = -(-rows // puts[0].tiles) * 2048 * 2
        assert tile_bytes <= MOST_TILE_BYTES
        assert puts[0].tiles == 1 or tile_bytes > LEAST_TILE_BYTES // 2


def test_pushes_of_one_wave_stand_behind_the_tile_kernel_and_those_of_more_beside_it():
    short, long = (plan_of("matmul_reduce_scatter.scatter", KERNEL | {"sms": sms}, m=1000, **WIDE) for sms in (132, 8))
    assert [plan.sms_beside for plan in (short, long)] == [0, 4]
    after = [{queue.name: queue.after for queue in plan.schedule.queues} for plan in (short, long)]
    assert [queues[PUSHES] for queues in after] == [("tiles",), ()]
    # Sums that wait for peers hold SMs: the own pushes must be done by then.
    assert [queues["sums"] for queues in after] == [("tiles", PUSHES)] * 2
