"""Times of one matmul in many tile shapes, as campaigns/rates/gpu_tile_choice.py measures them, and what they say."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from overweave.ir.plan import MatmulConfig
from overweave.schedules.tiles.shape import BEST, count_tiles, shapes, tile_shape, tiles_to_cut

CALL_US = 5.0  # of any launch: what a shape's waves do not explain
Shape = tuple[int, int, int]  # m, n, k


class Candidate(NamedTuple):
    """A tile shape, and how its last tiles are dealt out (the option `split_k`)."""

    config: MatmulConfig
    split_k: int = 1

    @property
    def name(self) -> str:
        dealt = "" if self.split_k == 1 else f" k {self.split_k}"
        steps = "" if self.config.block_k == 64 else f"x{self.config.block_k}s{self.config.stages}"
        return f"{self.config.block_m}x{self.config.block_n}{steps}/{self.config.split_n}{dealt}"


class Timed(Struct, frozen=True):
    """A candidate's time, for a file."""

    config: MatmulConfig
    split_k: int
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
        return Times(
            self.m, self.n, self.k, self.library_us, {Candidate(one.config, one.split_k): one.us for one in self.timed}
        )


class Times(NamedTuple):
    """Of one matmul, in us: the better cuBLAS time, and every candidate's."""

    m: int
    n: int
    k: int
    library_us: float
    us: dict[Candidate, float]

    @property
    def shape(self) -> str:
        return f"{self.m:5d}x{self.n:5d}x{self.k:5d}"

    def said(self, one: Candidate) -> str:
        return f"{one.name:15s} {self.us[one]:8.1f} us {self.library_us / self.us[one]:5.3f}"

    def record(self) -> Record:
        timed = tuple(Timed(one.config, one.split_k, us) for one, us in self.us.items())
        return Record(self.m, self.n, self.k, self.library_us, timed)


def chosen(shape: Shape, sms: int, split_k: int | Literal["best"]) -> Candidate:
    """What the model takes, with tiles dealt out or without."""
    m, n, k = shape
    found = tile_shape((m,), n, sms, shapes("bfloat16", "hopper"), k, split_k == BEST)
    return Candidate(replace(found, split_tiles=0, split_k=0), found.split_k or 1)


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
    first = Candidate(configs[0])
    for one in map(Candidate, configs):
        ratios = []
        for times in found:
            waves, others = (whole_waves(times, each.config, sms) for each in (one, first))
            if waves and others and one in times.us and first in times.us:
                mine = wave_us(times.us[one], waves, one.config)
                ratios.append(wave_us(times.us[first], others, first.config) / mine)
        if ratios:
            yield f"{one.name:10s} {median(ratios):6.3f} of {first.name} per wave, {len(ratios)}"
