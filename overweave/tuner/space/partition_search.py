"""Which groups of waves to communicate together: FlashOverlap's Algorithm 1 as a shortest path over waves.

A partition of T waves is a path from wave 0 to wave T whose steps are its groups. The collective of a group starts when
its waves are computed and the collective before it has ended, so what a path costs grows with what its beginning costs:
the best paths to a wave are the best ones to earlier waves, each with one step more. T * T / 2 steps are looked at, in
place of 2 ** (T - 1) partitions. Times are those of Algorithm 1; the simulator, which shares none of this, has the last
word about the best few.
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
KEPT = 3  # partitions that the simulator compares


class WaveCosts(Struct, frozen=True):
    """What Algorithm 1 knows of a matmul and the collective behind it, in microseconds.

    wave_us: one wave of tiles. group_us: the collective of 1, 2, ... whole waves; last_us: of as many waves of which
    the last one is that of the matmul, which may have fewer tiles.
    """

    wave_us: float
    group_us: tuple[float, ...]
    last_us: tuple[float, ...]

    @property
    def waves(self) -> int:
        return len(self.group_us)

    def step_us(self, first: int, end: int) -> float:
        """The collective of the waves `[first, end)`."""
        return (self.last_us if end == self.waves else self.group_us)[end - first - 1]


def slowest(ranks: Iterable[WaveCosts]) -> WaveCosts:
    """What all ranks take together, whose loads differ: of each cost the largest one. Raises InputError for none."""
    costs = list(ranks)
    if not costs or len({each.waves for each in costs}) > 1:
        raise InputError("costs of all ranks", f"{len(costs)} ranks, whose waves differ", "Give as many waves for each")
    return WaveCosts(
        max(each.wave_us for each in costs),
        tuple(map(max, zip(*(each.group_us for each in costs), strict=True))),
        tuple(map(max, zip(*(each.last_us for each in costs), strict=True))),
    )


def predicted_us(partition: Partition, costs: WaveCosts) -> float:
    """Algorithm 1: when the collective of the last group ends. Raises InputError for a partition of other waves."""
    if sum(partition) != costs.waves or min(partition, default=0) < 1:
        raise InputError(f"partition {partition}", f"there are {costs.waves} waves", "Give groups of one wave or more")
    communicated_us = 0.0
    for end, size in zip(accumulate(partition), partition, strict=True):
        communicated_us = max(end * costs.wave_us, communicated_us) + costs.step_us(end - size, end)
    return communicated_us


def best_partitions(costs: WaveCosts, kept: int = KEPT) -> list[tuple[float, Partition]]:
    """The best partitions with their predicted microseconds, at most `kept`, the best one first; none of no waves.

    The first group has at most MOST_FIRST waves, and the last one MOST_LAST.
    """
    waves, wave_us = costs.waves, costs.wave_us
    best: list[list[Path]] = [[(0.0, ())]]  # to each wave, the quickest first
    firsts = [0.0]  # of each the quickest
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
        # A second best path to a wave goes on to nothing better than the best one does: few waves need be looked at.
        found = [
            (max(computed_us, ended_us) + costs.step_us(begin, end), (*groups, end - begin))
            for _, begin in nsmallest(kept, quickest)
            for ended_us, groups in best[begin]
        ]
        best.append(nsmallest(kept, found, key=_by_time))
        firsts.append(best[end][0][0] if best[end] else float("inf"))
    return best[waves] if waves else []


def _by_time(path: Path) -> tuple[float, int, Partition]:
    """Of two partitions that take as long, the one of fewer groups: each is a call of the library."""
    return path[0], len(path[1]), path[1]


def stretched(partition: Partition, waves: int) -> Partition:
    """A partition of another number of waves, its groups as large a share of them: for a size near a known one."""
    total = sum(partition)
    ends = [waves * end // total for end in accumulate(partition)]
    return tuple(hi - lo for lo, hi in zip([0, *ends], ends, strict=False) if lo < hi)


def words_of(partition: Partition) -> str:
    """As the option `groups` takes it: `1+2+2`."""
    return "+".join(map(str, partition))


def partition_of(words: str) -> Partition:
    """What `words_of` wrote."""
    return tuple(map(int, words.split("+")))


class Grouped(Struct, frozen=True, kw_only=True):
    """A matmul whose tiles run wave by wave, as Algorithm 1 asks for it.

    tiles: of a rank; per_wave: of a full wave. function: the collective of each group over `world_size` ranks.
    """

    tiles: int
    per_wave: int
    config: MatmulConfig
    k: int
    dtype: Dtype
    function: str
    world_size: int


def costs_on(machine: Machine, asked: Grouped) -> WaveCosts:
    """Of a matmul on a described machine: a wave by the rate of its tiles, collectives by their curve."""
    config, full_sms = asked.config, machine.processor.sms
    rate = machine.tile(config.kernel, config.block_m, config.block_n)
    flops = 2.0 * config.block_m * config.block_n * asked.k * full_sms
    wave_us = flops / (rate.tflops * 1e6 * machine.dtype_share(asked.dtype)) + rate.overhead_us
    tile_bytes = config.block_m * config.block_n * ITEMSIZE_BYTES[asked.dtype]

    def collective_us(tiles: int) -> float:
        alone_us = machine.collective_us(asked.function, asked.world_size, tiles * tile_bytes)
        return max(0.0, alone_us - machine.latency.call.us)

    sizes = range(1, -(-asked.tiles // asked.per_wave) + 1)
    lacking = len(sizes) * asked.per_wave - asked.tiles
    return WaveCosts(
        wave_us,
        tuple(collective_us(size * asked.per_wave) for size in sizes),
        tuple(collective_us(size * asked.per_wave - lacking) for size in sizes),
    )
