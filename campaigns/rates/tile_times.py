"""Times of one matmul in many tile shapes, as campaigns/rates/gpu_tile_choice.py measures them, and what they say."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from overweave.ir.plan import MatmulConfig
from overweave.schedules.tiles.shape import count_tiles, shapes, tile_shape, tiles_to_cut

CALL_US = 5.0  # of any launch: what a shape's waves do not explain
Shape = tuple[int, int, int]  # m, n, k


class Timed(Struct, frozen=True):
    """A tile shape's time, for a file."""

    config: MatmulConfig
    us: float


class Record(Struct, frozen=True):
    """Every time of one matmul, for a file."""

    m: int
    n: int
    k: int
    library_us: float
    timed: tuple[Timed, ...]

    @property
    def times(self) -> Times:
        return Times(self.m, self.n, self.k, self.library_us, {one.config: one.us for one in self.timed})


class Times(NamedTuple):
    """Of one matmul, in us: the better cuBLAS time, and every tile shape's."""

    m: int
    n: int
    k: int
    library_us: float
    us: dict[MatmulConfig, float]

    @property
    def shape(self) -> str:
        return f"{self.m:5d}x{self.n:5d}x{self.k:5d}"

    def said(self, one: MatmulConfig) -> str:
        return f"{tile_name(one):15s} {self.us[one]:8.1f} us {self.library_us / self.us[one]:5.3f}"

    def record(self) -> Record:
        timed = tuple(Timed(one, us) for one, us in self.us.items())
        return Record(self.m, self.n, self.k, self.library_us, timed)


def tile_name(config: MatmulConfig) -> str:
    steps = "" if config.block_k == 64 else f"x{config.block_k}s{config.stages}"
    return f"{config.block_m}x{config.block_n}{steps}/{config.split_n}"


def steps_of(k: int, config: MatmulConfig) -> int:
    """Of the main loop."""
    return -(-k // config.block_k)


def chosen(shape: Shape, sms: int) -> MatmulConfig:
    """What the model takes."""
    m, n, k = shape
    return tile_shape((m,), n, sms, shapes("bfloat16", "hopper"), k)


def whole_waves(times: Times, config: MatmulConfig, sms: int) -> int:
    """How many waves of whole tiles a matmul has; 0 if any of its tiles is narrow."""
    count = count_tiles((times.m,), times.n, config)
    return 0 if count.narrow or tiles_to_cut(count, sms, config) else -(-count.tiles // sms)


def wave_us(us: float, waves: int, config: MatmulConfig) -> float:
    """Of a wave of tiles as large as 128 x 256."""
    return (us - CALL_US) / waves / (config.block_m * config.block_n) * 128 * 256


def efficiencies(found: list[Times], configs: list[MatmulConfig], sms: int) -> Iterator[str]:
    """Each tile shape's time per wave against the first one's, where neither has a narrow tile: the median over the
    matmuls, and how many these are.
    """
    first = configs[0]
    for one in configs:
        ratios = []
        for times in found:
            waves, others = (whole_waves(times, each, sms) for each in (one, first))
            if waves and others and one in times.us and first in times.us:
                mine = wave_us(times.us[one], waves, one)
                ratios.append(wave_us(times.us[first], others, first) / mine)
        if ratios:
            yield f"{tile_name(one):10s} {median(ratios):6.3f} of {tile_name(first)} per wave, {len(ratios)}"
