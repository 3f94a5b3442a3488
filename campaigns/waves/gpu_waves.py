"""Do groups of waves fill when they are predicted to, on one GPU?

    python -m campaigns.gpu_waves [--shapes 30] [--machine h200x4]

Matmuls of an all-reduce by wave groups, whose tiles leave SMs to a library, with no library beside them: when the last
tile of each group is stored, against the matmul's time by its share of the waves; which share of tiles ends in its own
wave; and the time of the matmul with 8 to 32 SMs left free, against that with all of them by the number of waves
(FlashOverlap, arXiv 2504.19519, algorithm 1). Beside them are the microseconds that were measured, and those of as many
waves on the described machine. In the end stands the line through them, for each number of SMs: what every matmul has
beside its waves, and by which factor these are as slow as described, since fewer SMs run at a higher clock. Exit code 1
where a group fills more than 5 % of the matmul's time from its prediction, or times are 3 % off in the mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from statistics import linear_regression
from typing import NamedTuple

import torch

from campaigns.gpu_ranks import need_gpus, spread_over
from campaigns.rates.operands import make_normal, operands
from overweave.hardware.machine import Machine, default_for, load
from overweave.ir.blocks import Blocks, stored_shape
from overweave.ir.plan import MatmulConfig, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Collective
from overweave.ir.tile_order import NO_SIGNAL
from overweave.memory.device.signals import CLAIMED, STORED
from overweave.schedules.catalog.catalog import build
from overweave.schedules.communication import STAGED, TILES
from overweave.schedules.families.wave_groups import count_waves
from overweave.tuner.calibrate.rates import Matmul, medians_us
from overweave.tuner.space.waves import WaveGroups, wave_costs

# Tile kernels whose results lie block by block, alone on one GPU.

RANKS = 2  # of the plan whose tables a lone GPU runs: it waits for nobody
Shape = tuple[int, int, int]


class Stored(NamedTuple):
    """A matmul that stores block by block, with the plan that says how."""

    plan: Plan
    matmul: Matmul
    blocks: Blocks

    @property
    def config(self) -> MatmulConfig:
        assert self.plan.realization.matmul is not None
        return self.plan.realization.matmul


def plan_of(shape: Shape, library_sms: int = 16, groups: str = "auto") -> Plan:
    """The wave groups of an all-reduce, in the tiles of the Hopper kernel."""
    m, n, k = shape
    problem = Problem(operator="matmul_all_reduce", m=m, n=n, k=k, world_size=RANKS, dtype="bfloat16")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    options: dict[str, str | int] = {"kernel": "hopper", "sms": sms, "library_sms": library_sms, "groups": groups}
    return build("matmul_all_reduce.waves", problem, options, rank=0)


def stored(plan: Plan, a: torch.Tensor, b: torch.Tensor, sms_beside: int = 0, traced: bool = False) -> Stored:
    """The tiles of a plan on one GPU, which tell nobody."""
    buffer = plan.schedule.buffer(STAGED)
    out = torch.full(stored_shape(buffer), float("nan"), device=a.device, dtype=a.dtype)
    rows = tuple(row._replace(signal=NO_SIGNAL) for row in plan.tile_order(0, TILES).rows)
    assert plan.realization.matmul is not None
    assert buffer.blocks is not None
    matmul = Matmul(plan.realization.matmul, rows, a, b, out, traced=traced, sms_beside=sms_beside)
    return Stored(plan, matmul, buffer.blocks)


LIBRARY_SMS = 16
LEFT_FREE = (8, 16, 24, 32)
MOST_OFF, MOST_MEAN = 0.05, 0.03
SHAPES: tuple[Shape, ...] = tuple(
    (m, n, k) for m in (2048, 4096, 8192, 16384) for n in (2048, 4096, 8192) for k in (1024, 2048, 4096, 8192)
)
RUNS = 5


class Filled(NamedTuple):
    """How far the groups of one matmul filled from their predictions, at most, as a share of its time; the share of
    tiles that ended in their wave."""

    off: float
    in_wave: float


def group_sizes(plan: Plan) -> list[int]:
    """The tiles of each group."""
    own = (one for one in plan.schedule.of_rank(0) if isinstance(one, Collective))
    return [sum(wait.count for wait in one.waits) for one in own]


def filled(shape: Shape) -> Filled:
    """The groups of one matmul, the median of several runs."""
    plan = plan_of(shape, library_sms=LIBRARY_SMS)
    a, b = operands(*shape)
    make_normal(a, b)
    matmul = stored(plan, a, b, LIBRARY_SMS, traced=True).matmul
    sms, sizes = matmul.launch.programs, group_sizes(plan)
    waves = count_waves(sum(sizes), sms, 1)
    found: list[Filled] = []
    for _ in range(RUNS + 1):
        torch.cuda._sleep(200_000)
        matmul()
        torch.cuda.synchronize()
        times = matmul.trace.cpu()
        begin = int(times[:, CLAIMED.value].min())
        ends = (times[:, STORED.value] - begin).tolist()
        total, first, off = max(ends), 0, 0.0
        for size in sizes:
            predicted = total * count_waves(first + size, sms, 1) / waves
            off = max(off, abs(max(ends[first : first + size]) - predicted) / total)
            first += size
        place = {tile: at for at, tile in enumerate(sorted(range(len(ends)), key=ends.__getitem__))}
        found.append(Filled(off, sum(place[tile] // sms == tile // sms for tile in place) / len(place)))
    return sorted(found[1:])[RUNS // 2]


class Timed(NamedTuple):
    """A matmul with some SMs left free. waves_us: of its waves, on the described machine."""

    free: int
    waves: int
    us: float
    waves_us: float

    def __str__(self) -> str:
        return f"{self.free} SMs free: {self.us:.1f} us, {self.waves} waves of {self.waves_us / self.waves:.2f}"


class Line(NamedTuple):
    """`fixed_us + factor * waves_us`, and how far the farthest time is from it, as a share of that time."""

    fixed_us: float
    factor: float
    off: float


def beside(shape: Shape, machine: Machine) -> list[Timed]:
    """The matmul with all SMs, and with each number of them left free."""
    plan = plan_of(shape, library_sms=1)
    a, b = operands(*shape)
    make_normal(a, b)
    free, tiles = (0, *LEFT_FREE), sum(group_sizes(plan))
    calls = [stored(plan, a, b, sms) for sms in free]
    found = list[Timed]()
    for sms, call, us in zip(free, calls, medians_us([call.matmul for call in calls]), strict=True):
        programs = call.matmul.launch.programs
        asked = WaveGroups(
            tiles=tiles, per_wave=programs, config=call.config, k=shape[2], dtype="bfloat16", function="all_reduce",
            world_size=RANKS,
        )  # fmt: skip
        waves = count_waves(tiles, programs, 1)
        found.append(Timed(sms, waves, us, waves * wave_costs(machine, asked).wave_us))
    return found


def errors(timed: list[Timed]) -> list[float]:
    """How far each time but the first is from the first one by the number of waves."""
    whole, *left = timed
    return [each.us / (whole.us * each.waves / whole.waves) - 1 for each in left]


def lines(timed: list[Timed]) -> Iterator[tuple[int, Line]]:
    """The line through the times of all shapes, by the SMs left free."""
    for free in sorted({each.free for each in timed}):
        own = [each for each in timed if each.free == free]
        if len({each.waves_us for each in own}) < 2:
            continue
        factor, fixed_us = linear_regression([each.waves_us for each in own], [each.us for each in own])
        yield (
            free,
            Line(fixed_us, factor, max(abs(fixed_us + factor * each.waves_us - each.us) / each.us for each in own)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=30)
    parser.add_argument("--machine", default=default_for(RANKS))
    asked = parser.parse_args()
    need_gpus()
    machine = load(asked.machine)
    groups, off, times = list[Filled](), list[float](), list[Timed]()
    for shape in spread_over(SHAPES, asked.shapes):
        groups.append(filled(shape))
        own = beside(shape, machine)
        off += errors(own)
        times += own
        text, left = "x".join(map(str, shape)), [round(one, 3) for one in errors(own)]
        found = f"groups at most {groups[-1].off:.3f} off, {groups[-1].in_wave:.3f} of tiles in their wave"
        print(f"{text}: {found}; with {LEFT_FREE} SMs free {left}; {'; '.join(map(str, own))}", flush=True)
    for free, line in lines(times):
        print(f"{free} SMs free, all shapes: {line.fixed_us:.1f} us and {line.factor:.3f} times the waves of "
              f"{machine.name}, at most {line.off:.3f} off")  # fmt: skip
    worst, mean = max(one.off for one in groups), sum(map(abs, off)) / len(off)
    in_wave = sum(one.in_wave for one in groups) / len(groups)
    print(f"groups at most {worst:.3f} off ({MOST_OFF}), {in_wave:.3f} of tiles in their wave, times {mean:.3f} off in "
          f"the mean ({MOST_MEAN})")  # fmt: skip
    sys.exit(int(worst > MOST_OFF or mean > MOST_MEAN))


if __name__ == "__main__":
    main()
