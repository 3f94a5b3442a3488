"""Which tile shape a matmul gets: the one whose waves take the least time, and which tiles of the last wave are cut.

Where the last wave would leave half of the SMs idle or more, its tiles are cut in two (`MatmulConfig.split_n`), and a
last column that half a tile holds gets half tiles. Bits do not change: each element is summed over the same steps of k.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Literal, NamedTuple

from msgspec import Struct

from overweave.errors import InputError
from overweave.ir.plan import NO_EPILOGUE, Dtype, Epilogue, MatmulConfig, ReduceConfig

Kernel = Literal["portable", "hopper"]
# Time of half a tile against a whole one. MEASURED: 128 x 128 runs at 0.9 of the rate of 128 x 256 (see HOPPER).
CUT_TILE_COST = 0.56


class TileShape(Struct, frozen=True):
    """A tile shape and what share of the best shape's speed it reaches when every wave is full."""

    config: MatmulConfig
    efficiency: float


def _hopper(block_m: int, block_n: int, group_m: int, stages: int, efficiency: float) -> TileShape:
    config = MatmulConfig(
        kernel="hopper",
        block_m=block_m,
        block_n=block_n,
        block_k=64,
        group_m=group_m,
        stages=stages,
        warps=4,
        split_n=2 if block_m >= 128 and block_n >= 128 else 1,
    )
    return TileShape(config, efficiency)


def _shape(block_m: int, block_n: int, block_k: int, warps: int, stages: int, efficiency: float) -> TileShape:
    config = MatmulConfig(block_m=block_m, block_n=block_n, block_k=block_k, group_m=16, warps=warps, stages=stages)
    return TileShape(config, efficiency)


# The smaller a tile, the more often an operand is read: 128 x 256 does 85 multiply-adds per element, 128 x 128 does 64.
HALF_PRECISION = (
    _shape(128, 256, 64, 8, 4, 1.0),
    _shape(256, 128, 64, 8, 4, 0.97),
    _shape(128, 128, 64, 8, 4, 0.88),
    _shape(64, 256, 64, 8, 4, 0.85),
    _shape(128, 128, 64, 4, 4, 0.84),
)
# MEASURED: time per full wave against 128 x 256, over nine shapes of 1,024 to 8,192 rows (H200, 2026-11-20).
HOPPER = (
    _hopper(128, 256, 16, 3, 1.0),
    _hopper(256, 128, 8, 3, 0.95),
    _hopper(128, 128, 16, 5, 0.9),
    # Not measured: guessed from how often an operand is read, for shards of few rows and results of few tiles.
    _hopper(64, 256, 16, 4, 0.78),
    _hopper(64, 128, 16, 7, 0.66),
    _hopper(128, 64, 16, 7, 0.66),
)
# Without tensor cores (no TF32) the operands live in registers, which the tile must leave room for.
SINGLE_PRECISION = (
    _shape(128, 64, 16, 8, 3, 1.0),
    _shape(64, 128, 16, 8, 3, 0.98),
    _shape(64, 64, 16, 4, 2, 0.9),
)


def shapes(dtype: Dtype, kernel: Kernel = "portable", epilogue: Epilogue = NO_EPILOGUE) -> tuple[TileShape, ...]:
    """The candidates of a tile kernel, the most efficient first. Raises InputError if it cannot compute the dtype."""
    candidates = _shapes(dtype, kernel)
    if kernel == "portable" and epilogue.residual:
        # Beside the sums of larger tiles the residual does not fit: the assembler spills registers.
        return tuple(shape for shape in candidates if shape.config.block_m * shape.config.block_n <= 128 * 128)
    return candidates


def _shapes(dtype: Dtype, kernel: Kernel) -> tuple[TileShape, ...]:
    if kernel == "hopper" and dtype == "float32":
        raise InputError("kernel hopper", "it multiplies 16-bit numbers, not float32", "Use kernel=portable")
    if kernel == "hopper":
        return HOPPER
    return SINGLE_PRECISION if dtype == "float32" else HALF_PRECISION


Columns = int | tuple[int, ...]  # of one product, or of each of several


def tile_shape(heights: Iterable[int], cols: Columns, sms: int, candidates: tuple[TileShape, ...]) -> MatmulConfig:
    """The candidate with the shortest time for chunks of `heights` rows each and `cols` columns on `sms` SMs.

    Time is waves x tile area / efficiency. Tiles never straddle chunks, so each chunk is rounded up by itself.
    """
    heights = tuple(heights)

    def time(shape: TileShape) -> float:
        config = shape.config
        waves = _waves(count_tiles(heights, cols, config), sms, config)
        return waves * config.block_m * config.block_n / shape.efficiency

    return min(candidates, key=time).config


class TileCount(NamedTuple):
    """How many tiles are whole, and how many, in a last column that half a tile holds, are half."""

    whole: int
    half: int

    @property
    def load(self) -> float:
        """In times of a whole tile."""
        return self.whole + CUT_TILE_COST * self.half


def count_tiles(heights: Iterable[int], cols: Columns, config: MatmulConfig) -> TileCount:
    """The tiles of chunks of `heights` rows each and `cols` columns, before any is cut."""
    rows = sum(-(-height // config.block_m) for height in heights)
    if isinstance(cols, tuple):
        counts = [_count_tiles(rows, one, config) for one in cols]
        return TileCount(sum(count.whole for count in counts), sum(count.half for count in counts))
    return _count_tiles(rows, cols, config)


def _count_tiles(rows: int, cols: int, config: MatmulConfig) -> TileCount:
    """rows: of tiles."""
    columns, rest = divmod(cols, config.block_n)
    if config.split_n > 1 and 0 < rest <= config.block_n // config.split_n:
        return TileCount(rows * columns, rows)
    return TileCount(rows * (columns + (rest > 0)), 0)


def tiles_to_cut(count: TileCount, sms: int, config: MatmulConfig) -> int:
    """How many of the last whole tiles are cut in two: those of the last wave, if their halves fit into one."""
    rest = ceil(count.load % sms)
    return min(rest, count.whole) if config.split_n > 1 and rest <= sms // 2 else 0


def _waves(count: TileCount, sms: int, config: MatmulConfig) -> float:
    whole = ceil(count.load / sms)
    return whole - 1 + CUT_TILE_COST if tiles_to_cut(count, sms, config) else whole


# The ordered reduction's tiles, the largest first: 16 bytes a thread and operand, or four times that.
SUMS = (
    ReduceConfig(),
    ReduceConfig(block_m=2, block_n=1024, warps=8),
    ReduceConfig(block_m=1, block_n=1024, warps=4),
    ReduceConfig(block_m=1, block_n=512, warps=2),
)


def reduction_shape(rows: int, cols: int, sms: int) -> ReduceConfig:
    """The largest tiles of a sum that give every other SM one; if none do, the smallest that a row fills."""
    filled = [config for config in SUMS if config.block_n <= cols] or [SUMS[0]]
    fits = (config for config in filled if -(-rows // config.block_m) * -(-cols // config.block_n) >= sms // 2)
    return next(fits, filled[-1])
