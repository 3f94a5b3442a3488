"""How the rectangles of a tile are dealt out over allocations of shared memory."""

from __future__ import annotations

from itertools import product

import pytest
from triton.experimental.gluon import language as gl

from overweave.kernels.hopper import tiles
from overweave.schedules.tiles.shape import FLOAT8_HOPPER, HOPPER


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_multiplied_as_one_is_a_view_of_a_whole_allocation(
    monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Where a view must have as many bytes as what it shows; elsewhere all rectangles lie in one allocation."""
    monkeypatch.setattr(tiles, "VIEWED_WHOLE", gl.constexpr(whole))
    dealt = {(shape.config.split_n, shape.config.stages) for shape in (*HOPPER, *FLOAT8_HOPPER)}
    for parts, groups in dealt | set(product(range(1, 9), (1, 2, 5, 7))):
        first = tiles.count_first(parts, groups)
        if whole:
            assert first % tiles.power_of_two(parts) == 0
            assert first in (parts * groups, tiles.power_of_two(parts) * groups)
        else:
            assert first == parts * groups


def test_five_rectangles_of_five_stages_need_a_second_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "VIEWED_WHOLE", gl.constexpr(True))
    assert tiles.count_first(5, 5) == 20
    assert tiles.count_first(5, 2) == 8  # results of the two consumers
    assert tiles.count_first(3, 4) == 12  # 6 pairs, of which the last two are no pair of one stage
