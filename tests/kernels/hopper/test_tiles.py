"""Which rows the producer of the Hopper matmul loads and its consumers take them for: device code, run as Python."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overweave.ir.tile_order import TileRow
from overweave.kernels.hopper import tiles

DEVICE_CODE = ("shifts_rows", "row_shift", "load_rows", "consumer_position")
PARTS_OF = {64: (1, 2), 128: (2,)}  # rows of a consumer's part: how many parts a tile has


class Tile(NamedTuple):
    """What a row of a table says of a tile's rows. height: how many it has; of the chunk there are no more behind."""

    row: int
    source_row: int
    height: int

    @property
    def columns(self) -> dict[str, int]:
        """By name."""
        return {"row": self.row, "row_end": self.row + self.height, "source_row": self.source_row, "col": 0}


@pytest.fixture(scope="module")
def called():
    """The device functions as Python functions, by name: they call each other, and read one row of a table."""
    with pytest.MonkeyPatch.context() as patch:
        for name in DEVICE_CODE:
            patch.setattr(tiles, name, getattr(getattr(tiles, name), "fn", getattr(tiles, name)))
        patch.setattr(tiles, "gl", SimpleNamespace(maximum=max, minimum=min))
        patch.setattr(tiles, "weight_index", lambda *_: 0)
        patch.setattr(tiles, "read_column", lambda table, _, column: table[TileRow._fields[column.value]])
        yield {name: getattr(tiles, name) for name in DEVICE_CODE}


SHAPES = [(rows, parts) for rows, counts in PARTS_OF.items() for parts in counts]


@given(shape=st.sampled_from(SHAPES), tile=st.builds(Tile, *[st.integers(0, 300)] * 2, st.integers(1, 256)))
def test_consumers_take_rows_for_those_that_the_producer_loads(
    called: dict[str, Callable[..., Any]], shape: tuple[int, int], tile: Tile
):
    rows, parts = shape
    tile = tile._replace(height=min(tile.height, rows * parts))
    traits = SimpleNamespace(addends=0, weights=1)
    top, further = called["load_rows"](traits, tile.columns, 0, rows, parts)
    stored = []
    for part in range(parts):
        own_row, first, row_end, _, _ = called["consumer_position"](traits, tile.columns, 0, part * rows, 0, rows)
        loaded = top + part * further
        assert loaded - first == tile.source_row - tile.row
        assert min(first, loaded) >= 0
        assert first + rows <= row_end or min(first, loaded) == 0  # rows beyond the end, where there are none before
        stored += [at for at in range(first, first + rows) if own_row <= at < row_end]
    assert stored == list(range(tile.row, tile.row + tile.height))


def test_tiles_with_addends_have_their_own_rows(called: dict[str, Callable[..., Any]]):
    traits, tile = SimpleNamespace(addends=1, weights=1), Tile(128, 128, 5)
    assert called["load_rows"](traits, tile.columns, 0, 64, 2) == (128, 64)
    assert called["consumer_position"](traits, tile.columns, 0, 64, 0, 64)[:2] == (192, 192)
