"""The tile shape follows the waves."""

from __future__ import annotations

import pytest

from overweave.errors import InputError
from overweave.schedules.tile_shape import shapes, tile_shape


def blocks(heights: tuple[int, ...], cols: int, sms: int = 132, dtype: str = "bfloat16") -> tuple[int, int]:
    config = tile_shape(heights, cols, sms, shapes(dtype))
    return config.block_m, config.block_n


def test_large_problems_take_the_most_efficient_tile():
    assert blocks((2048,) * 4, 28672) == (128, 256)


def test_a_nearly_empty_last_wave_changes_the_shape():
    # 132 tiles of 128 x 256 are one wave; 144 are two, of which the second is nearly empty.
    assert blocks((128 * 11,), 256 * 12) == (128, 256)
    assert blocks((128 * 12,), 256 * 12) != (128, 256)


def test_low_chunks_take_low_tiles():
    assert blocks((64,) * 8, 256 * 20) == (64, 256)


def test_a_smaller_gpu_chooses_for_itself():
    assert len({blocks((1024,), 4096, sms) for sms in range(8, 140, 4)}) > 1


def test_full_precision_has_shapes_of_its_own():
    assert blocks((4096,), 4096, dtype="float32") in {(s.config.block_m, s.config.block_n) for s in shapes("float32")}
    assert len(shapes("bfloat16")) >= 3


def test_the_hopper_kernel_takes_tiles_for_two_groups_of_warps_and_16_bits():
    assert {shape.config.kernel for shape in shapes("float16", "hopper")} == {"hopper"}
    assert all(shape.config.block_m >= 128 for shape in shapes("bfloat16", "hopper"))
    with pytest.raises(InputError, match="kernel=portable"):
        shapes("float32", "hopper")
