"""Which groups of waves to communicate together: FlashOverlap's Algorithm 1 as a shortest path over waves.

A partition of T waves is a path from wave 0 to wave T whose steps are its groups. The collective of a group starts when
its waves are computed and the collective before it has ended, so the cost of a path grows with the cost of its prefix:
the best paths to a wave are the best ones to earlier waves, each with one step more. That takes T * T / 2 steps instead
of 2 ** (T - 1) partitions. Times are those of Algorithm 1; the simulator, which shares none of this, compares the best
few.
SOURCE: FlashOverlap (arXiv 2504.19519), 4.1.4 and Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from itertools import accumulate

from msgspec import Struct

from overweave.errors import InputError
from overweave.hardware.machine import Machine
from overweave.ir.dtype import ITEMSIZE_BYTES, Dtype
from overweave.ir.plan import MatmulConfig

Partition = tuple[int, ...]
Path = tuple[float, Partition]  # microseconds, and the groups so far
# SOURCE: FlashOverlap 4.1.4: waves of the first group and of the last one, at most.
MOST_FIRST, MOST_LAST = 2, 4
MOST_COMPARED = 3  # partitions that the simulator compares


class WaveCosts(Struct, frozen=True):
    """The inputs of Algorithm 1 for a matmul and the collective behind it, in microseconds.

    wave_us: one wave of tiles. group_us: the collective of 1, 2, ... whole waves; last_us: the same if the last of them
    is the matmul's last wave, which may have fewer tiles.
    """

    wave_us: float
    group_us: tuple[float, ...]
    last_us: tuple[float, ...]

    @property
    def waves(self) -> int:
        return len(self.group_us)

    def step_us(self, first: int, end: int) -> float:
        """Return the time of the collective of the waves `[first, end)`."""
        return (self.last_us if end == self.waves else self.group_us)[end - first - 1]


def slowest_costs(ranks: Iterable[WaveCosts]) -> WaveCosts:
    """Return the costs of all ranks together: the largest of each. Raises InputError for none, or unequal numbers of
    waves."""
    costs = list(ranks)
    if not costs or len({each.waves for each in costs}) > 1:
        raise InputError("costs of all ranks", f"{len(costs)} ranks, whose waves differ", "Give as many waves for each")
    return WaveCosts(
        max(each.wave_us for each in costs),
        tuple(map(max, zip(*(each.group_us for each in costs), strict=True))),
        tuple(map(max, zip(*(each.last_us for each in costs), strict=True))),
    )


def predicted_us(partition: Partition, costs: WaveCosts) -> float:
    """Return when the collective of the last group ends (Algorithm 1). Raises InputError for a partition of other
    waves."""
    if sum(partition) != costs.waves or min(partition, default=0) < 1:
        raise InputError(f"partition {partition}", f"there are {costs.waves} waves", "Give groups of one wave or more")
    communicated_us = 0.0
    for end, size in zip(accumulate(partition), partition, strict=True):
        communicated_us = max(end * costs.wave_us, communicated_us) + costs.step_us(end - size, end)
    return communicated_us


def best_partitions(costs: WaveCosts, most: int = MOST_COMPARED) -> list[tuple[float, Partition]]:
    """Return the best partitions with their predicted microseconds, at most `most`, the best one first; none of no
    waves. The first group has at most MOST_FIRST waves, and the last one MOST_LAST."""
    waves, wave_us = costs.waves, costs.wave_us
    best: list[list[Path]] = [[(0.0, ())]]  # wave -> its best paths, the fastest first
    firsts = [0.0]  # wave -> the time of its fastest path
    for end in range(1, waves + 1):
        lengths = costs.last_us if end == waves else costs.group_us
        nearest = max(0, end - MOST_LAST) if end == waves else 0
        computed_us = end * wave_us
        quickest = [
            ((ended_us if ended_us > computed_us else computed_us) + step_us, begin)
            for begin, (ended_us, step_us) in enumerate(
                zip(firsts[nearest:], reversed(lengths[: end - nearest]), strict=True), nearest
            )
            if begin or end <= MOST_FIRST
        ]
        # A second best path to a wave never continues better than the best one: few waves need be visited.
        paths = [
            (max(computed_us, ended_us) + costs.step_us(begin, end), (*groups, end - begin))
            for _, begin in nsmallest(most, quickest)
            for ended_us, groups in best[begin]
        ]
        best.append(nsmallest(most, paths, key=_by_time))
        firsts.append(best[end][0][0] if best[end] else float("inf"))
    return best[waves] if waves else []


def _by_time(path: Path) -> tuple[float, int, Partition]:
    """Return the sort key: of equal times the partition of fewer groups, since each is a call of NCCL."""
    return path[0], len(path[1]), path[1]


def scale_partition(partition: Partition, waves: int) -> Partition:
    """Return a partition of another number of waves, with groups in proportion: for a size near a known one."""
    total = sum(partition)
    ends = [waves * end // total for end in accumulate(partition)]
    return tuple(hi - lo for lo, hi in zip([0, *ends], ends, strict=False) if lo < hi)


def format_partition(partition: Partition) -> str:
    """Return the partition as the option `groups`: `1+2+2`."""
    return "+".join(map(str, partition))


def parse_partition(text: str) -> Partition:
    """Return the partition that `format_partition` wrote."""
    return tuple(map(int, text.split("+")))


class WaveGroups(Struct, frozen=True, kw_only=True):
    """A matmul whose tiles run wave by wave, the subject of Algorithm 1. tiles: of a rank; per_wave: of a full wave.
    function: the collective of each group over `world_size` ranks."""

    tiles: int
    per_wave: int
    config: MatmulConfig
    k: int
    dtype: Dtype
    function: str
    world_size: int


def wave_costs(machine: Machine, matmul: WaveGroups) -> WaveCosts:
    """Return the costs on a described machine: a wave by the rate of its tiles, collectives by their curve."""
    config, full_sms = matmul.config, machine.processor.sms
    rate = machine.tile(config.kernel, config.block_m, config.block_n)
    flops = 2.0 * config.block_m * config.block_n * matmul.k * full_sms
    wave_us = flops / (rate.tflops * 1e6 * machine.dtype_share(matmul.dtype)) + rate.overhead_us
    tile_bytes = config.block_m * config.block_n * ITEMSIZE_BYTES[matmul.dtype]

    def collective_us(tiles: int) -> float:
        alone_us = machine.collective_us(matmul.function, matmul.world_size, tiles * tile_bytes)
        return max(0.0, alone_us - machine.latency.call.us)

    sizes = range(1, -(-matmul.tiles // matmul.per_wave) + 1)
    lacking = len(sizes) * matmul.per_wave - matmul.tiles
    return WaveCosts(
        wave_us,
        tuple(collective_us(size * matmul.per_wave) for size in sizes),
        tuple(collective_us(size * matmul.per_wave - lacking) for size in sizes),
    )
