"""Chooses the tile shape of a grouped matmul by experts, whose group sizes the device alone knows: as for even groups.

Each group ends in a tile of its own. A tile with rows for the first of two consumers alone takes less than a whole one.
"""

from __future__ import annotations

from math import ceil

from msgspec import Struct

from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import MatmulConfig, narrow_width
from overweave.schedules.tiles.shape import KernelChoice, TileShape, shapes, tile_time_us

# Time of a tile with rows for one of its two consumers, in whole tiles: the ratio of tiles of 64 and 128 rows.
SHORT_TIME = 0.6
# Relative speed of tiles of 192 columns, where each group loads columns of its own.
# MEASURED: 0.95 to 0.97 at six of eight sizes (benchmarks/results/grouped.h200.2026-11-29.txt).
NARROWER = {192: 0.965}
FEW_WAVES = 4
FEW_ROWS = 64  # of a group: loading the weights is all the time, and the lowest tiles have most loads in flight


class Groups(Struct, frozen=True):
    """A grouped matmul: rows of all groups, experts, columns, k, dtype and epilogue."""

    rows: int
    experts: int
    n: int
    k: int
    dtype: Dtype
    epilogue: Epilogue


def shapes_of_experts(dtype: Dtype, kernel: KernelChoice, epilogue: Epilogue) -> tuple[TileShape, ...]:
    """Return the shapes whose accumulators leave registers for the row-wise scaling and masking of experts."""
    candidates = shapes(dtype, kernel, epilogue)
    if kernel == "portable":
        return candidates
    if dtype == FLOAT8 and epilogue.products == 1:
        return tuple(shape for shape in candidates if shape.config.block_m * shape.config.block_n < 128 * 256)
    return tuple(shape for shape in candidates if shape.config.block_m <= 128)


def grouped_shape(groups: Groups, kernel: KernelChoice, sms: int) -> MatmulConfig:
    """Return the tile shape with the shortest time if each expert has equally many rows."""
    height = -(-groups.rows // max(1, groups.experts))
    candidates = shapes_of_experts(groups.dtype, kernel, groups.epilogue)
    low = tuple(shape for shape in candidates if shape.config.block_m <= FEW_ROWS)
    if height <= FEW_ROWS and low:
        candidates = low
    return min(candidates, key=lambda shape: _time_us(groups, height, shape, sms)).config


def _time_us(groups: Groups, height: int, shape: TileShape, sms: int) -> float:
    """Return the time of a shape for groups of `height` rows each."""
    config = shape.config
    tiles, last_rows = divmod(height, config.block_m)
    tile_rows = tiles + (0.0 if not last_rows else SHORT_TIME if _is_short(last_rows, config) else 1.0)
    columns, last_cols = divmod(groups.n, config.block_n)
    width = narrow_width(last_cols, config) if last_cols else 0
    tile_cols = columns + (width / config.block_n if width else float(last_cols > 0))
    load = groups.experts * tile_rows * tile_cols
    waves = load / sms
    # Tiles are claimed one by one, and groups end anywhere: of many waves the last is half full on average.
    waves = ceil(waves) if waves < FEW_WAVES else waves + 0.5
    return waves * tile_time_us(shape, groups.k) / NARROWER.get(config.block_n, 1.0)


def _is_short(rows: int, config: MatmulConfig) -> bool:
    """Return whether a tile with so many rows has none for the second consumer."""
    return config.kernel == "hopper" and config.block_m >= 128 and rows <= config.block_m // 2
