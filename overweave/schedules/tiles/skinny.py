"""When the matmul of few rows may compute a problem, and in which configuration."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from overweave.ir.plan import MOST_SPLITS, SkinnyConfig

Multiplier = Literal["library", "skinny", "early"]
DTYPES = ("bfloat16", "float16")
# By the most rows that they take, the quickest over n and k of decoding; more rows are several tiles of the last.
# MEASURED: benchmarks/results/skinny.h200.2026-11-22.txt, of 1, 8, 16 and 64 rows. What is for 32 was not measured.
SHAPES = (
    SkinnyConfig(block_m=16, block_n=64, block_k=128, stages=5, swapped=True),
    SkinnyConfig(block_m=32, block_n=64, block_k=128, stages=5, swapped=True),
    SkinnyConfig(block_m=64, block_n=64, block_k=64, stages=8),
)
LEAST_STEPS = 2  # of a share along k


def skinny_shape(shape: tuple[int, int, int], sms: int) -> SkinnyConfig:
    """The configuration for `(m, n, k)`: in as many shares along k as leave no SM without a program, and none with two
    where others have one."""
    m, n, k = shape
    config = next((one for one in SHAPES if m <= one.block_m), SHAPES[-1])
    tiles = -(-max(m, 1) // config.block_m) * -(-n // config.block_n)
    splits = min(MOST_SPLITS, sms // tiles, k // (LEAST_STEPS * config.block_k))
    return replace(config, splits=max(1, splits))
