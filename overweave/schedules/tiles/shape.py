"""Chooses the tile shape of a matmul: that whose waves take the least time; and which tiles of the last wave are split.

If the last wave would leave so many SMs idle that narrower tiles take less time, its tiles are split into their TMA
boxes of columns (`MatmulConfig.split_n`), and a last column of tiles has no more of these than it needs. Bits do not
change: each element is summed over the same steps of k.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import NO_EPILOGUE, Epilogue
from overweave.ir.plan import (
    LEAST_WAVES,
    MESSAGE_DATA_BYTES,
    MOST_SPLITS,
    MatmulConfig,
    PackedConfig,
    PackedExchange,
    ReduceConfig,
    SkinnyConfig,
    narrow_width,
    split_obstacle,
)

KernelChoice = Literal["portable", "hopper"]
# Time of one rectangle of a tile of (block_n, split_n) against the whole tile. The fewer stages a tile's kernel has,
# the less a small rectangle gains: it waits for memory.
# MEASURED: by `python -m campaigns.tile_fit` (benchmarks/results/tile_fit.h200.2026-11-27.txt); of (128, 2) the mean of
# two heights. Not measured: (160, 5), which is taken to be as (192, 3).
RECTANGLE_TIMES = {(256, 2): 0.68, (256, 4): 0.69, (192, 3): 0.66, (160, 5): 0.66, (128, 2): 0.75}

# Of a step of 64 in k, in 16 bits, by tiles of 128 x 256. MEASURED: as RECTANGLE_TIMES.
STEP_US = 0.69

# The least time of a step of the Hopper kernel, for each row of `a` and column of `b` that it loads, where these begin
# at odd multiples of 16 bytes: the 128 bytes of a step then lie in five sectors of 32 bytes, and in two lines.
# MEASURED: 2.1 to 2.3 ns in all tile shapes, the median of 10 matmuls (the same file).
STRADDLING_US = 0.0022


FIXED_FOR_ROWS = 1024  # a guess between decoding and prefill: not measured
LARGEST_TILE, HALF_A_TILE = 128 * 256, 128 * 128  # elements of the tile that most problems take, and of half of one


class TileShape(Struct, frozen=True):
    """A tile shape. efficiency: its speed in full waves, as a fraction of the fastest shape's."""

    config: MatmulConfig
    efficiency: float


def _hopper(tile: tuple[int, ...], split_n: int, group_m: int, stages: int, efficiency: float) -> TileShape:
    """Return a Hopper tile shape. tile: rows, columns, and the step of k (64 by default)."""
    block_m, block_n, *steps = tile
    config = MatmulConfig(
        kernel="hopper",
        block_m=block_m,
        block_n=block_n,
        block_k=steps[0] if steps else 64,
        group_m=group_m,
        stages=stages,
        warps=4,
        split_n=split_n,
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
# MEASURED: with these, what the model takes is within 1.0 % of the best of all tile shapes in the geometric mean, of 91
# matmuls of models and 26 random ones, and within 1.3 % of 16 whose k is any multiple of 8 (the same file).
HOPPER = (
    _hopper((128, 256), 2, 16, 3, 1.0),
    _hopper((128, 256), 4, 16, 3, 0.995),
    _hopper((128, 192), 3, 16, 4, 0.995),
    _hopper((256, 128), 2, 8, 3, 0.92),
    _hopper((128, 128), 2, 16, 5, 0.895),
    _hopper((128, 160), 5, 16, 5, 0.925),
    _hopper((64, 256), 1, 16, 4, 0.83),
    _hopper((64, 128), 1, 16, 7, 0.665),
    _hopper((128, 64), 1, 16, 7, 0.56),
)
# Two products in each tile, of block_n columns each: as many sums as twice the columns have. Not measured: see HOPPER.
GATED: dict[KernelChoice, tuple[TileShape, ...]] = {
    "portable": (
        _shape(128, 128, 64, 8, 4, 1.0),
        _shape(64, 128, 64, 4, 4, 0.85),
        _shape(64, 128, 64, 8, 4, 0.8),
    ),
    "hopper": (
        _hopper((128, 128), 1, 16, 4, 1.0),
        _hopper((256, 64), 1, 8, 4, 0.9),
        _hopper((128, 64), 1, 16, 6, 0.85),
    ),
}
# Without tensor cores (no TF32) the operands live in registers, which the tile must leave room for.
SINGLE_PRECISION = (
    _shape(128, 64, 16, 8, 3, 1.0),
    _shape(64, 128, 16, 8, 3, 0.98),
    _shape(64, 64, 16, 4, 2, 0.9),
)


# A step of k is as long as Hopper's tensor cores may add products of fp8 on their own, and fills a swizzle's 128 bytes.
# Beside the sums stands one step's product: no more than 128 columns of 64 rows fit for each of four warps.
# Not measured: efficiencies are guessed from how often an operand is read.
FLOAT8_PORTABLE = (
    _shape(128, 128, 128, 8, 4, 1.0),
    _shape(64, 128, 128, 4, 4, 0.85),
)
FLOAT8_HOPPER = (
    _hopper((128, 256, 128), 2, 16, 3, 1.0),
    _hopper((128, 128, 128), 2, 16, 5, 0.9),
    _hopper((64, 256, 128), 1, 16, 4, 0.85),
    _hopper((64, 128, 128), 1, 16, 7, 0.66),
)
# Two products of fp8 in each tile: sums of both, and beside them one step's product of 128 columns.
GATED_FLOAT8: dict[KernelChoice, tuple[TileShape, ...]] = {
    "portable": (
        _shape(128, 64, 128, 8, 4, 1.0),
        _shape(64, 128, 128, 8, 4, 0.95),
        _shape(64, 64, 128, 4, 4, 0.8),
    ),
    "hopper": (
        _hopper((128, 128, 128), 1, 16, 4, 1.0),
        _hopper((128, 64, 128), 1, 16, 6, 0.8),
    ),
}


def shapes(
    dtype: Dtype, kernel: KernelChoice = "portable", epilogue: Epilogue = NO_EPILOGUE, weights: int = 1
) -> tuple[TileShape, ...]:
    """Return the tile shapes of a kernel, the most efficient first. Raises InputError if it cannot compute the dtype.

    weights: number of B matrices of a launch.
    """
    candidates = _shapes(dtype, kernel)
    if epilogue.products > 1 and dtype != "float32":
        return _gated_shapes(dtype, kernel, epilogue)
    if kernel == "portable" and epilogue.reads_rows:
        # With larger accumulators the residual does not fit the registers: ptxas spills.
        return tuple(shape for shape in candidates if shape.config.block_m * shape.config.block_n <= 128 * 128)
    if kernel == "portable" and epilogue.steps and weights > 2:
        # With 256 rows the selection among three B matrices does not fit the registers either.
        return tuple(shape for shape in candidates if shape.config.block_m <= 128)
    if kernel == "hopper" and epilogue.steps:
        # With a main loop for each of four tile widths and an epilogue, ptxas spills a few registers; also with three
        # B matrices and 256 columns in one accumulator.
        widest = 192 if weights > 2 and dtype != FLOAT8 else 256
        narrow = (shape for shape in candidates if shape.config.block_n <= widest or shape.config.block_m < 128)
        return tuple(shape for shape in narrow if shape.config.split_n < 4)
    return candidates


def _gated_shapes(dtype: Dtype, kernel: KernelChoice, epilogue: Epilogue) -> tuple[TileShape, ...]:
    """Return the shapes of gated tiles whose two accumulators leave registers for the epilogue."""
    if dtype != FLOAT8:
        return GATED[kernel][-1:] if kernel == "portable" and epilogue.reads_rows else GATED[kernel]
    # Tiles of 128 columns: without an activation the compiler keeps more values at once than with one.
    has_room = epilogue.activation is not None if epilogue.scaling == "tensor" else not epilogue.reads_rows
    return GATED_FLOAT8[kernel] if has_room or kernel == "portable" else GATED_FLOAT8[kernel][1:]


def _shapes(dtype: Dtype, kernel: KernelChoice) -> tuple[TileShape, ...]:
    if kernel == "hopper" and dtype == "float32":
        raise InputError("kernel hopper", "it multiplies 16-bit numbers, not float32", "Use kernel=portable")
    if dtype == FLOAT8:
        return FLOAT8_HOPPER if kernel == "hopper" else FLOAT8_PORTABLE
    if kernel == "hopper":
        return HOPPER
    return SINGLE_PRECISION if dtype == "float32" else HALF_PRECISION


def has_second_wave(rows: int, cols: int, world_size: int, sms: int) -> bool:
    """Return whether a shard of the rows has more tiles than the SMs compute in one wave."""
    return rows * cols > LEAST_WAVES * world_size * sms * LARGEST_TILE


def half_tiles(candidates: tuple[TileShape, ...]) -> tuple[TileShape, ...]:
    """Return the shapes of at most half the largest tile, for rings whose shards have no second wave of whole tiles.

    With halves they have, so that SMs compute one wave while the other is in flight. MEASURED: half tiles were quicker
    on all 7 such shapes, by 5 to 26 %, and on 1 of the 14 others, by 3 % (two H200s,
    benchmarks/results/rings.*.h200x2.2026-11-22.json).
    """
    return tuple(shape for shape in candidates if shape.config.block_m * shape.config.block_n <= HALF_A_TILE)


Columns = int | tuple[int, ...]  # of one product, or of each of several


def tile_shape(
    heights: Iterable[int],
    cols: Columns,
    sms: int,
    candidates: tuple[TileShape, ...],
    k: int,
) -> MatmulConfig:
    """Return the candidate with the shortest time for chunks of `heights` rows each and `cols` columns on `sms` SMs.

    Time is waves x the time of a tile. Tiles never straddle chunks, so each chunk is rounded up by itself.
    """
    heights = tuple(heights)

    def time_us(shape: TileShape) -> float:
        return _waves(count_tiles(heights, cols, shape.config), sms, shape.config) * tile_time_us(shape, k)

    return min(candidates, key=time_us).config


def fixed_tiles(cols: Columns, sms: int, candidates: tuple[TileShape, ...], k: int) -> MatmulConfig:
    """Return one candidate for any number of rows, so that all are multiplied in one order over k: the quickest for
    FIXED_FOR_ROWS of them. Tiles of the last wave stay whole: how many would be split depends on the rows."""
    whole = tuple(replace(each, config=replace(each.config, split_n=1)) for each in candidates)
    possible = tuple(each for each in whole if not split_obstacle(each.config))
    return tile_shape((FIXED_FOR_ROWS,), cols, sms, possible or whole, k)


def tile_time_us(shape: TileShape, k: int) -> float:
    """Return the time of a whole tile in a full wave."""
    config = shape.config
    multiply_us = STEP_US * k / 64 * config.block_m * config.block_n / (128 * 256) / shape.efficiency
    if not _straddles(k, config):
        return multiply_us
    return max(multiply_us, STRADDLING_US * k / 64 * (config.block_m + config.block_n))


def _straddles(k: int, config: MatmulConfig) -> bool:
    """Return whether TMA loads fetch rows of k 16-bit numbers that begin at odd multiples of 16 bytes.

    Of fp8, whose steps are of 128, this was not measured.
    """
    return config.kernel == "hopper" and config.block_k <= 64 and k % 16 != 0


class TileCount(NamedTuple):
    """Numbers of whole tiles, and of narrow ones in a last column, which take `narrow_time` whole tiles together."""

    whole: int
    narrow: int = 0
    narrow_time: float = 0.0

    @property
    def tiles(self) -> int:
        return self.whole + self.narrow

    @property
    def load(self) -> float:
        """Return the time of all tiles, in whole tiles."""
        return self.whole + self.narrow_time


def count_tiles(heights: Iterable[int], cols: Columns, config: MatmulConfig) -> TileCount:
    """Count the tiles of chunks of `heights` rows each and `cols` columns, before any is split."""
    rows = sum(-(-height // config.block_m) for height in heights)
    counts = [_count_tiles(rows, one, config) for one in (cols if isinstance(cols, tuple) else (cols,))]
    return TileCount(*(sum(numbers) for numbers in zip(*counts, strict=True)))


def _count_tiles(rows: int, cols: int, config: MatmulConfig) -> TileCount:
    """Count the tiles of one product. rows: of tiles."""
    columns, rest = divmod(cols, config.block_n)
    width = narrow_width(rest, config) if rest else 0
    if width:
        return TileCount(rows * columns, rows, rows * _time_of_parts(width // config.part_n, config))
    return TileCount(rows * (columns + (rest > 0)))


def tiles_to_cut(count: TileCount, sms: int, config: MatmulConfig) -> int:
    """Return how many of the last whole tiles to split: those of the last wave, if that takes less time."""
    rest = ceil(count.load % sms)
    return min(rest, count.whole) if _time_of_cut(rest, sms, config) < 1 else 0


def _time_of_parts(parts: int, config: MatmulConfig) -> float:
    """Return the time of a tile of so many TMA boxes, in whole tiles."""
    alone = RECTANGLE_TIMES.get((config.block_n, config.split_n), 1 / config.split_n)
    return alone + (1 - alone) * (parts - 1) / max(1, config.split_n - 1)


def _time_of_cut(rest: int, sms: int, config: MatmulConfig) -> float:
    """Return the time of a wave of so many tiles, each split into all its boxes, in whole tiles."""
    if config.split_n == 1:
        return float(rest > 0)
    return ceil(rest * config.split_n / sms) * _time_of_parts(1, config)


def _waves(count: TileCount, sms: int, config: MatmulConfig) -> float:
    """Return the time of all waves, in whole tiles; the last one split if that is faster."""
    whole, cut = divmod(ceil(count.load), sms)
    return whole + min(_time_of_cut(cut, sms, config), 1.0)


# The ordered reduction's tiles, the largest first: 16 bytes a thread and operand, or four times that.
SUMS = (
    ReduceConfig(),
    ReduceConfig(block_m=2, block_n=1024, warps=8),
    ReduceConfig(block_m=1, block_n=1024, warps=4),
    ReduceConfig(block_m=1, block_n=512, warps=2),
)


# The largest beside what an epilogue reads: so that the registers hold all of it.
SUMS_FINISHED = ReduceConfig(block_m=4)


PART_ELEMENTS = 4096  # of a tile of whole rows, summed at a time: more would not fit the registers of 8 warps


def row_shape(rows: int, cols: int, sms: int) -> ReduceConfig:
    """Return tiles of whole rows, for sums that end with a norm: as high as leaves work for every other SM."""
    block_n = 1 << (cols - 1).bit_length()
    parts = max(1, block_n // PART_ELEMENTS)
    block_m = max(1, PART_ELEMENTS // block_n)
    while block_m > 1 and -(-rows // block_m) < sms // 2:
        block_m //= 2
    return ReduceConfig(block_m=block_m, block_n=block_n, parts=parts, warps=max(block_m * block_n // parts // 512, 1))


def reduction_shape(rows: int, cols: int, sms: int, finishes: bool = False) -> ReduceConfig:
    """Return the largest reduction tiles that give every other SM one; if none do, the smallest that a row fills.

    finishes: an epilogue finishes the sum.
    """
    first = SUMS_FINISHED if finishes else SUMS[0]
    filled = [config for config in (first, *SUMS[1:]) if config.block_n <= cols] or [first]
    fits = (config for config in filled if -(-rows // config.block_m) * -(-cols // config.block_n) >= sms // 2)
    return next(fits, filled[-1])


# Programs of the packed kernel, smallest first: a thread has one message of each peer in flight.
PACKED = (PackedConfig(), PackedConfig(block=256, warps=8), PackedConfig(block=512, warps=16))


# Of whole rows. Those between spill a few registers where they share sums among eight ranks.
PACKED_ROWS = (PACKED[0], PACKED[-1])


def packed_shape(sent_bytes: int, sms: int, exchange: PackedExchange) -> PackedConfig:
    """Return the smallest programs of which no SM gets more than four: tickets are serial. sent_bytes: to a peer."""
    messages = -(-sent_bytes // MESSAGE_DATA_BYTES)
    config = next((config for config in PACKED if -(-messages // config.block) <= 4 * sms), PACKED[-1])
    return replace(config, exchange=exchange)


def packed_row_shape(row_bytes: int, exchange: PackedExchange) -> PackedConfig:
    """Return the smallest programs if they have a whole row in flight at once, else the largest, which loop."""
    messages = -(-row_bytes // MESSAGE_DATA_BYTES)
    return replace(PACKED_ROWS[messages > PACKED_ROWS[0].block], exchange=exchange)


# The configuration of the skinny (few rows) matmul kernel.

Multiplier = Literal["library", "skinny", "early"]
DTYPES = ("bfloat16", "float16")
# By the most rows that they take, the quickest over n and k of decoding; more rows are several tiles of the last.
# MEASURED: benchmarks/results/skinny.h200.2026-11-22.txt, of 1, 8, 16 and 64 rows. What is for 32 was not measured.
SHAPES = (
    SkinnyConfig(block_m=16, block_n=64, block_k=128, stages=5, swapped=True),
    SkinnyConfig(block_m=32, block_n=64, block_k=128, stages=5, swapped=True),
    SkinnyConfig(block_m=64, block_n=64, block_k=64, stages=8),
)
LEAST_STEPS = 2  # of k, for each split


def skinny_shape(shape: tuple[int, int, int], sms: int) -> SkinnyConfig:
    """Return the skinny kernel's configuration for `(m, n, k)`: as many splits of k as leave one program an SM."""
    m, n, k = shape
    config = next((one for one in SHAPES if m <= one.block_m), SHAPES[-1])
    tiles = -(-max(m, 1) // config.block_m) * -(-n // config.block_n)
    splits = min(MOST_SPLITS, sms // tiles, k // (LEAST_STEPS * config.block_k))
    return replace(config, splits=max(1, splits))
