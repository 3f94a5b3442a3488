"""What it costs to deal a tile's steps of k out to several programs (`TileRow.shares`)."""

from __future__ import annotations

from overweave.ir.plan import MatmulConfig

# Of tiles of 128 x 256. Most of it is the stores, which all SMs make at once.
# MEASURED: by `python -m campaigns.tile_fit`, in benchmarks/results/tile_fit.h200.2026-11-27.txt.
LEAVE_US = 6.4  # to store a share's products
COUNT_US = 1.8  # to count a share in, of any tile
READ_US = 1.2  # to add one share


def scale_of(config: MatmulConfig) -> float:
    """How large a tile is, against 128 x 256."""
    return config.block_m * config.block_n / (128 * 256)


def to_share_us(tile_us: float, part: float, config: MatmulConfig) -> float:
    """To multiply such a part of a tile of `tile_us`, leave the products and count them in."""
    return part * tile_us + scale_of(config) * LEAVE_US + COUNT_US


def sum_us(shares: float, config: MatmulConfig) -> float:
    """To add so many shares of a tile. Of two, the last has its own at hand."""
    return scale_of(config) * READ_US * (1 if shares == 2 else shares)
