"""What the campaign asks for and how it reads its times; no GPU is needed for either."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from campaigns.gpu_rates import configs as tried
from campaigns.gpu_tile_choice import MOST_TILES, SETS, Timed, configs, local_shapes
from overweave.ir.plan import MatmulConfig, split_obstacle
from overweave.schedules.tile_shape import shapes, tile_shape


def test_local_shapes_are_those_of_one_rank_and_stand_once():
    found = list(local_shapes(list(SETS), 4))
    assert len(found) == len(set(found))
    assert {(8192, 2752, 4096), (8192, 4096, 2752), (512, 12288, 12288), (2048, 2560, 8192)} <= set(found)
    assert min(m for m, _, _ in found) == 512
    for m, n, _ in found:  # what is chosen is always among what is timed
        chosen = tile_shape((m,), n, 132, shapes("bfloat16", "hopper"))
        assert -(-m // chosen.block_m) * -(-n // chosen.block_n) <= MOST_TILES


def test_a_wave_is_counted_as_one_of_the_largest_tiles():
    half = MatmulConfig(kernel="hopper", block_m=128, block_n=128)
    assert Timed(half, time_us=25.0, waves=2).wave_us == 20.0
    assert Timed(replace(half, block_n=256), time_us=25.0, waves=1).wave_us == 20.0


@pytest.mark.parametrize("kernel", ["hopper", "portable"])
def test_every_tile_shape_is_tried_once_and_can_be(kernel):
    configs_of = tried((kernel,))
    assert len(configs_of) == len(set(configs_of))
    assert not [config for config in configs_of if split_obstacle(config)]
    if kernel == "hopper":
        assert set(configs()) <= set(configs_of)
        assert {(config.block_n, config.split_n) for config in configs()} >= {(192, 3), (256, 2), (256, 4)}
