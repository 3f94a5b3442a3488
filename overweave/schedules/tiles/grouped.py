"""Which tile shape a matmul of many experts gets, whose rows only the device knows: as `tile_shape`, of even groups.

Each group ends in a tile of its own. One with rows for the first of two consumers alone takes less than a whole one.
"""

from __future__ import annotations

from math import ceil

from msgspec import Struct

from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import MatmulConfig, narrow_width
from overweave.schedules.tiles.shape import KernelChoice, TileShape, shapes, tile_time_us

# Of a tile with rows for one of its two consumers, in times of a whole one: as tiles of 64 rows and of 128 are.
SHORT_TIME = 0.6
# Of tiles of 192 columns, beside those of 256, where each group brings columns of its own.
# MEASURED: 0.95 to 0.97 at six of eight sizes (benchmarks/results/grouped.h200.2026-11-29.txt).
NARROWER = {192: 0.965}
FEW_WAVES = 4
FEW_ROWS = 64  # of a group: reading the weights takes the time, and the lowest tiles have most of them under way


class Groups(Struct, frozen=True):
    """A matmul by experts: how many rows in all, experts, columns and steps; what else the kernel does to its tiles."""

    rows: int
    experts: int
    n: int
    k: int
    dtype: Dtype
    epilogue: Epilogue


def shapes_of_experts(dtype: Dtype, kernel: KernelChoice, epilogue: Epilogue) -> tuple[TileShape, ...]:
    """The shapes beside whose sums the assembler finds registers for what is done to rows of experts."""
    found = shapes(dtype, kernel, epilogue)
    if kernel == "portable":
        return found
    if dtype == FLOAT8 and epilogue.products == 1:
        return tuple(shape for shape in found if shape.config.block_m * shape.config.block_n < 128 * 256)
    return tuple(shape for shape in found if shape.config.block_m <= 128)


def grouped_shape(groups: Groups, kernel: KernelChoice, sms: int) -> MatmulConfig:
    """The candidate with the shortest time if each expert has equally many rows."""
    height = -(-groups.rows // max(1, groups.experts))
    found = shapes_of_experts(groups.dtype, kernel, groups.epilogue)
    low = tuple(shape for shape in found if shape.config.block_m <= FEW_ROWS)
    if height <= FEW_ROWS and low:
        found = low
    return min(found, key=lambda shape: _time_us(groups, height, shape, sms)).config


def _time_us(groups: Groups, height: int, shape: TileShape, sms: int) -> float:
    config = shape.config
    tiles, rest = divmod(height, config.block_m)
    rows = tiles + (0.0 if not rest else SHORT_TIME if _is_short(rest, config) else 1.0)
    columns, left = divmod(groups.n, config.block_n)
    width = narrow_width(left, config) if left else 0
    across = columns + (width / config.block_n if width else float(left > 0))
    load = groups.experts * rows * across
    waves = load / sms
    # Tiles are claimed one by one, and groups end anywhere: of many waves the last is half full on average.
    waves = ceil(waves) if waves < FEW_WAVES else waves + 0.5
    return waves * tile_time_us(shape, groups.k) / NARROWER.get(config.block_n, 1.0)


def _is_short(rows: int, config: MatmulConfig) -> bool:
    return config.kernel == "hopper" and config.block_m >= 128 and rows <= config.block_m // 2
