"""Tiles of the last wave that are dealt out along k: how many, in how many shares, and the rows they become.

A last wave of few tiles leaves SMs idle. Where k is long enough, the steps of each of its tiles are dealt out in as
many shares, which any program may claim; the one that ends a tile's last share sums them (`TileRow.shares`).

Stretches that begin and end anywhere within tiles, one for each SM (stream-K), were slower wherever they were tried:
what shares cost is more than what an even last wave gains.
MEASURED: benchmarks/results/split_k.h200.2026-11-22.txt, where they are called `even` and `even_two`.

In overlapped plans of 512 rows and more no shape was quickest with shares; local matmuls of fewer rows are why shares
stay. MEASURED: of 45 matmuls of 64 and 256 rows, 19 are quicker with shares than in the best whole tile; the mean gain
of all is 1.08, the largest 1.66 (benchmarks/results/split_k_small.h200.2026-11-24.txt).
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from overweave.ir.plan import MatmulConfig
from overweave.ir.tile_order import TileRow
from overweave.sim.split_k import partial_tile_us, sum_partials_us

MOST_SHARES = 8  # of a tile, which the last one reads one after the other
LEAST_STEPS = 4  # of a share: below, what it leaves and reads costs more than it multiplies


class Deal(Struct, frozen=True):
    """tiles: how many of the last are dealt out, each in so many shares. time_us: until the last sum is stored."""

    tiles: int
    shares: int
    time_us: float = 0.0


def deals(tiles: int, sms: int, config: MatmulConfig, k: int, tile_us: float) -> Iterator[Deal]:
    """Every way to deal out those of so many tiles that are the last wave, if it is not full.

    tile_us: the time of a whole tile.
    """
    rest = tiles % sms
    for shares in range(2, MOST_SHARES + 1) if rest else ():
        if is_worthwhile(shares, config, k):
            rounds, part = -(-rest * shares // sms), -(-steps_of(k, config) // shares) / steps_of(k, config)
            yield Deal(rest, shares, rounds * partial_tile_us(tile_us, part, config) + sum_partials_us(shares, config))


def is_worthwhile(shares: int, config: MatmulConfig, k: int) -> bool:
    """Whether shares are not too short."""
    return steps_of(k, config) >= LEAST_STEPS * shares


def dealt_out(config: MatmulConfig, deal: Deal) -> MatmulConfig:
    """The configuration whose last tiles are dealt out so."""
    return replace(config, split_tiles=deal.tiles, split_k=deal.shares)


def steps_of(k: int, config: MatmulConfig) -> int:
    """Of the main loop of a whole tile."""
    return -(-k // config.block_k)


def with_shares(rows: list[TileRow], config: MatmulConfig, k: int) -> list[TileRow]:
    """A table whose last `split_tiles` rows are dealt out. A tile's shares stand beside each other."""
    first = max(0, len(rows) - config.split_tiles)
    steps, shares = steps_of(k, config), config.split_k
    bounds = [steps * share // shares * config.block_k for share in range(shares)] + [k]
    found = rows[:first]
    for at, row in enumerate(rows[first:]):
        for share, (lo, hi) in enumerate(zip(bounds, bounds[1:], strict=False)):
            found.append(row._replace(k_lo=lo, k_hi=hi, share=share, shares=shares, partial=at * shares))
    return found
