"""Do groups of waves fill when they are predicted to, on one GPU?

    python -m campaigns.gpu_waves [--shapes 30]

Matmuls of an all-reduce by wave groups, whose tiles leave SMs to a library, with no library beside them: when the last
tile of each group is stored, against the matmul's time by its share of the waves; which share of tiles ends in its own
wave; and the time of the matmul with 8 to 32 SMs left free, against that with all of them by the number of waves
(FlashOverlap, arXiv 2504.19519, algorithm 1). Exit code 1 where a group fills more than 5 % of the matmul's time from
its prediction, or times are 3 % off in the mean.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import torch

from campaigns.gpu_ranks import need_gpus, spread_over
from campaigns.waves.in_blocks import Shape, plan_of, stored
from overweave.ir.plan import Plan
from overweave.ir.schedule import Collective
from overweave.memory.device.signals import CLAIMED, STORED
from overweave.schedules.families.wave_groups import count_waves
from overweave.tuner.calibrate.alone import make_normal, medians_us, operands

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


def beside(shape: Shape) -> list[float]:
    """How far the time of the matmul is from the prediction with each number of SMs left free."""
    plan = plan_of(shape, library_sms=1)
    a, b = operands(*shape)
    make_normal(a, b)
    calls = [stored(plan, a, b, sms).matmul for sms in (0, *LEFT_FREE)]
    whole, *left = medians_us([*calls])
    waves = [count_waves(sum(group_sizes(plan)), call.launch.programs, 1) for call in calls]
    return [us / (whole * some / waves[0]) - 1 for us, some in zip(left, waves[1:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=30)
    asked = parser.parse_args()
    need_gpus()
    groups, times = list[Filled](), list[float]()
    for shape in spread_over(SHAPES, asked.shapes):
        groups.append(filled(shape))
        times += beside(shape)
        text, left = "x".join(map(str, shape)), [round(one, 3) for one in times[-len(LEFT_FREE) :]]
        found = f"groups at most {groups[-1].off:.3f} off, {groups[-1].in_wave:.3f} of tiles in their wave"
        print(f"{text}: {found}; with {LEFT_FREE} SMs free {left}", flush=True)
    worst, mean = max(one.off for one in groups), sum(map(abs, times)) / len(times)
    in_wave = sum(one.in_wave for one in groups) / len(groups)
    print(f"groups at most {worst:.3f} off ({MOST_OFF}), {in_wave:.3f} of tiles in their wave, times {mean:.3f} off in "
          f"the mean ({MOST_MEAN})")  # fmt: skip
    sys.exit(int(worst > MOST_OFF or mean > MOST_MEAN))


if __name__ == "__main__":
    main()
