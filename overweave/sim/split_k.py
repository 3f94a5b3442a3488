"""Costs of split-K: a tile's steps of k divided among several programs (`TileRow.shares`)."""

from __future__ import annotations

from overweave.ir.plan import MatmulConfig

# Of tiles of 128 x 256. Most of it is the stores, which all SMs make at once.
# MEASURED: by `python -m campaigns.tile_fit`, in benchmarks/results/tile_fit.h200.2026-11-27.txt.
LEAVE_US = 6.4  # to store a partial sum
COUNT_US = 1.8  # to count its arrival, of any tile
READ_US = 1.2  # to add one partial sum


def relative_tile_size(config: MatmulConfig) -> float:
    """Return the elements of a tile relative to 128 x 256."""
    return config.block_m * config.block_n / (128 * 256)


def partial_tile_us(tile_us: float, part: float, config: MatmulConfig) -> float:
    """Return the time to multiply a fraction `part` of a tile's k, store the partial sum and count its arrival."""
    return part * tile_us + relative_tile_size(config) * LEAVE_US + COUNT_US


def sum_partials_us(shares: float, config: MatmulConfig) -> float:
    """Return the time to add the partial sums of a tile. Of two, the last program has its own in registers."""
    return relative_tile_size(config) * READ_US * (1 if shares == 2 else shares)
