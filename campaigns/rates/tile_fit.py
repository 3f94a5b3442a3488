"""The constants by which tile shapes are chosen, drawn from measured times. No GPU is needed.

    python -m campaigns.tile_fit FILE... [--sms 132]

FILE: what `python -m campaigns.gpu_tile_choice --times FILE` wrote. Prints how near what the model takes comes to the
best of the tile shapes that it knows, for each file; and of all files, for each tile shape what a wave of whole tiles
takes, a step of k and beside its steps (least squares of the relative errors), and from the first shape's steps the
efficiencies; RECTANGLE_TIMES of schedules/tiles/shape.py, what last waves of cut tiles took, the median. All these from
matmuls whose k is a multiple of 64; of those whose rows begin at odd multiples of 16 bytes STRADDLING_US, a step of
each tile shape, the median.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import torch
from msgspec import Struct

from overweave.ir.plan import MatmulConfig
from overweave.schedules.tiles.shape import HOPPER, count_tiles, shapes, tile_shape, tiles_to_cut
from overweave.tuner.measure.timer import geometric_mean

# Times of one matmul in many tile shapes, as campaigns/rates/gpu_tile_choice.py measures them, and what they say.

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


LEAST_ROWS = 6  # of an equation with three unknowns


class Wave(NamedTuple):
    """What a call of one tile shape takes: call_us + waves x (tile_us + step_us x steps of k)."""

    call_us: float
    tile_us: float
    step_us: float

    def us(self, waves: float, steps: int) -> float:
        """Of so many waves."""
        return self.call_us + waves * self.of_one(steps)

    def of_one(self, steps: int) -> float:
        """A wave."""
        return self.tile_us + self.step_us * steps


def read_times(path: Path) -> list[Times]:
    """What gpu_tile_choice wrote."""
    return [msgspec.json.decode(line, type=Record).times for line in path.read_bytes().splitlines()]


def least_squares(rows: list[list[float]], values: list[float]) -> list[float]:
    """The unknowns for which rows @ unknowns is nearest to the values, each row's error relative to its value."""
    scale = 1 / torch.tensor(values, dtype=torch.float64)
    left = torch.tensor(rows, dtype=torch.float64) * scale[:, None]
    found = torch.linalg.lstsq(left, torch.ones(len(values), 1, dtype=torch.float64)).solution
    return [float(one) for one in found[:, 0]]


def fitted(found: list[Times], config: MatmulConfig, sms: int) -> Wave | None:
    """From the matmuls whose tiles are all whole; None if they are too few."""
    rows, values = [], []
    for times in found:
        waves = whole_waves(times, config, sms)
        if waves and config in times.us:
            rows.append([1.0, waves, waves * steps_of(times.k, config)])
            values.append(times.us[config])
    return Wave(*least_squares(rows, values)) if len(rows) >= LEAST_ROWS else None


def rectangle_times(found: list[Times], config: MatmulConfig, wave: Wave, sms: int) -> list[float]:
    """Of one round of a cut last wave, in times of a whole wave, for each matmul that has one."""
    shares = []
    for times in found:
        count = count_tiles((times.m,), times.n, config)
        cut = tiles_to_cut(count, sms, config)
        if not cut or count.narrow or config not in times.us:
            continue
        rounds, steps = -(-cut * config.split_n // sms), steps_of(times.k, config)
        left_us = times.us[config] - wave.us((count.tiles - cut) // sms, steps)
        shares.append(left_us / rounds / wave.of_one(steps))
    return shares


def nearness(found: list[Times], sms: int) -> str:
    """How near the time of what the model takes comes to the least of those that it may take."""
    known = {shape.config for shape in HOPPER}
    shares = []
    for times in found:
        least = min(us for one, us in times.us.items() if one in known)
        shares.append(least / times.us[chosen((times.m, times.n, times.k), sms)])
    return f"{geometric_mean(shares):.4f} of the best over {len(shares)}, the worst {min(shares):.3f}"


def straddling_us(found: list[Times], config: MatmulConfig, sms: int) -> list[float]:
    """Of a step, for each row and column that it loads, where rows begin at odd multiples of 16 bytes."""
    each = []
    for times in found:
        waves = -(-count_tiles((times.m,), times.n, config).tiles // sms)
        if times.k % 16 and config in times.us:
            step_us = (times.us[config] - CALL_US) / waves / steps_of(times.k, config)
            each.append(step_us / (config.block_m + config.block_n))
    return each


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m campaigns.tile_fit")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--sms", type=int, default=132)
    asked = parser.parse_args()
    every, sms = list[Times](), asked.sms
    for path in asked.files:
        of_file = read_times(path)
        print(f"{path.name}: what the model takes: {nearness(of_file, sms)}")
        every += of_file
    found = [times for times in every if times.k % 64 == 0]
    configs = list(dict.fromkeys(one for times in found for one in times.us))
    waves = {config: wave for config in configs if (wave := fitted(found, config, sms)) is not None}
    first = next(iter(waves), None)
    for config, wave in waves.items():
        per_area = wave.step_us / (config.block_m * config.block_n * config.block_k)
        best = waves[first].step_us / (first.block_m * first.block_n * first.block_k) if first else per_area
        said = f"call {wave.call_us:6.2f} us, wave {wave.tile_us:6.2f} us and {wave.step_us:7.4f} us a step"
        print(f"{tile_name(config):10s} {said}, efficiency of steps {best / per_area:6.3f}")
    for config, wave in waves.items():
        shares = rectangle_times(found, config, wave, sms) if config.split_n > 1 else []
        if shares:
            key = config.block_n, config.split_n
            print(f"RECTANGLE_TIMES[{key}] = {median(shares):.2f}  # of {len(shares)}, block_m={config.block_m}")
    for shape in HOPPER:
        if each := straddling_us(every, shape.config, sms):
            print(f"{tile_name(shape.config):10s} STRADDLING_US = {median(each):.5f}  # of {len(each)}")


if __name__ == "__main__":
    main()
