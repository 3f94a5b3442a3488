"""Which tile shape a matmul gets: the one whose waves take the least time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from overweave.errors import InputError
from overweave.ir.plan import Dtype, MatmulConfig

Kernel = Literal["portable", "hopper"]


class TileShape(Struct, frozen=True):
    """A tile shape and what share of the best shape's speed it reaches when every wave is full."""

    config: MatmulConfig
    efficiency: float


def _hopper(block_m: int, block_n: int, group_m: int, stages: int, efficiency: float) -> TileShape:
    config = MatmulConfig(
        kernel="hopper", block_m=block_m, block_n=block_n, block_k=64, group_m=group_m, stages=stages, warps=4
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
)
# Without tensor cores (no TF32) the operands live in registers, which the tile must leave room for.
SINGLE_PRECISION = (
    _shape(128, 64, 16, 8, 3, 1.0),
    _shape(64, 128, 16, 8, 3, 0.98),
    _shape(64, 64, 16, 4, 2, 0.9),
)


def shapes(dtype: Dtype, kernel: Kernel = "portable") -> tuple[TileShape, ...]:
    """The candidates of a tile kernel, the most efficient first. Raises InputError if it cannot compute the dtype."""
    if kernel == "hopper" and dtype == "float32":
        raise InputError("kernel hopper", "it multiplies 16-bit numbers, not float32", "Use kernel=portable")
    if kernel == "hopper":
        return HOPPER
    return SINGLE_PRECISION if dtype == "float32" else HALF_PRECISION


def tile_shape(heights: Iterable[int], cols: int, sms: int, candidates: tuple[TileShape, ...]) -> MatmulConfig:
    """The candidate with the shortest time for chunks of `heights` rows each and `cols` columns on `sms` SMs.

    Time is waves x tile area / efficiency. Tiles never straddle chunks, so each chunk is rounded up by itself.
    """
    heights = tuple(heights)

    def time(shape: TileShape) -> float:
        config = shape.config
        tiles = sum(-(-height // config.block_m) for height in heights) * -(-cols // config.block_n)
        return -(-tiles // sms) * config.block_m * config.block_n / shape.efficiency

    return min(candidates, key=time).config
