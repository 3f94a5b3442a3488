"""What a launch of the tile kernels is given."""

from __future__ import annotations

import pytest

from overweave.runtime.matmul import hopper_parts, hopper_strip
from overweave.schedules.tile_shape import FLOAT8_HOPPER, HOPPER, TileShape


@pytest.mark.parametrize("shape", [*HOPPER, *FLOAT8_HOPPER], ids=lambda shape: str(shape.config))
def test_what_leaves_for_a_peer_is_whole_strips(shape: TileShape):
    """Rows of a strip are rows of swizzled shared memory, whose patterns are 8 rows high."""
    (rows, cols), (high, wide) = hopper_parts(shape.config), hopper_strip(shape.config)
    assert (rows % high, high % 8, cols % wide) == (0, 0, 0)
    assert wide in (32, 64)
