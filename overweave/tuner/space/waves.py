"""Partitions of waves as candidates, by Algorithm 1, for every method whose tiles are summed group by group.

They depend on a problem's number of waves, so they are not in the fixed space. A partition that was measured for one
problem is scaled to another in proportion to its waves.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from itertools import accumulate

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.machine import Machine
from overweave.ir.dtype import ITEMSIZE_BYTES, Dtype
from overweave.ir.plan import MatmulConfig
from overweave.ir.problem import Problem
from overweave.ir.shards import shard_rows
from overweave.schedules.catalog.catalog import matmul_config
from overweave.schedules.families.wave_groups import count_waves, wave_tiles
from overweave.schedules.methods.registry import methods_for
from overweave.schedules.records.record import Method
from overweave.sim.nccl import collective_us
from overweave.tuner.space.space import Candidate, MethodFamily, full_options, reason_unsupported
from overweave.tuner.space.target import Target

# A partition of T waves is a path from wave 0 to wave T whose steps are its groups. The collective of a group starts
# when its waves are computed and the collective before it has ended, so the cost of a path grows with the cost of its
# prefix: the best paths to a wave are the best ones to earlier waves, each with one step more. That takes T * T / 2
# steps instead of 2 ** (T - 1) partitions. Times are those of Algorithm 1; the simulator, which shares none of this,
# compares the best few.
# SOURCE: FlashOverlap (arXiv 2504.19519), 4.1.4 and Algorithm 1.

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

    def group_us(tiles: int) -> float:
        alone_us = collective_us(machine, matmul.function, tuple(range(matmul.world_size)), tiles * tile_bytes)
        return max(0.0, alone_us - machine.latency.call.us)

    sizes = range(1, -(-matmul.tiles // matmul.per_wave) + 1)
    lacking = len(sizes) * matmul.per_wave - matmul.tiles
    return WaveCosts(
        wave_us,
        tuple(group_us(size * matmul.per_wave) for size in sizes),
        tuple(group_us(size * matmul.per_wave - lacking) for size in sizes),
    )


GROUPS, LIBRARY_SMS = "groups", "library_sms"
MOST_WAVES = 128  # searched waves: partitions of more are scaled from these
DEFAULT_LIBRARY_SMS = 16  # SMs that tiles leave to NCCL if the candidate has no such option


def wave_families(problem: Problem, target: Target, machine: Machine, is_thorough: bool) -> Iterator[MethodFamily]:
    """Yield the best partitions of each method, if Algorithm 1 predicts a gain above its margin;
    is_thorough: always.
    """
    for method in methods_for(problem.operator):
        if not method.takes(GROUPS):
            continue
        library_sms = machine.sharing.collective.sms
        base = Candidate(method.name, ((LIBRARY_SMS, library_sms),))
        grouped = None if reason_unsupported(problem, target, base) else grouped_matmul(problem, target, base)
        if grouped is None:
            continue
        waves = count_waves(grouped.tiles, grouped.per_wave, 1)
        grouped = replace(grouped, tiles=min(grouped.tiles, MOST_WAVES * grouped.per_wave))
        costs = wave_costs(machine, grouped)
        partitions = best_partitions(costs)
        if is_thorough or _gains(partitions[0][0], costs, grouped, method, problem, target):
            words = tuple(
                dict.fromkeys(format_partition(scale_partition(partition, waves)) for _, partition in partitions)
            )
            yield MethodFamily(method.name, {GROUPS: words, LIBRARY_SMS: (library_sms,)})


def _gains(
    predicted_us: float, costs: WaveCosts, grouped: WaveGroups, method: Method, problem: Problem, target: Target
) -> bool:
    """Whether the predicted gain over the matmul on all SMs and its collective exceeds the method's margin times the
    doubt."""
    waves = -(-grouped.tiles // target.sms)
    plain_us, margin = waves * costs.wave_us + costs.last_us[-1], method.margin(problem, {})
    return predicted_us + target.found.doubt * (margin.us + margin.share * plain_us) < plain_us


def grouped_matmul(problem: Problem, target: Target, candidate: Candidate) -> WaveGroups | None:
    """Return the waves of a candidate on a problem; None if its shards have different numbers of them, or none."""
    options, record = full_options(problem, target, candidate), problem.record
    config = matmul_config(candidate.schedule(problem.operator), problem, options)
    ranks = problem.world_size
    shards = [(0, problem.m)] if record.shares_sums else [shard_rows(problem.m, ranks, rank) for rank in range(ranks)]
    heights = {-(-(hi - lo) // config.block_m) for lo, hi in shards}
    sms = int(options.get("sms", target.sms)) - int(options.get(LIBRARY_SMS, DEFAULT_LIBRARY_SMS))
    if ranks == 1 or len(heights) > 1 or not problem.m or sms < 1:
        return None
    return WaveGroups(
        tiles=len(shards) * max(heights) * -(-problem.n // config.block_n),
        per_wave=wave_tiles(sms, len(shards)),
        config=config,
        k=problem.k,
        dtype=problem.dtype,
        # Machines have no curves of all-to-alls: as much leaves a rank in an all-gather.
        function="all_reduce" if record.shares_sums else "reduce_scatter" if record.adds else "all_gather",
        world_size=ranks,
    )


def fit_groups(problem: Problem, target: Target, candidate: Candidate) -> Candidate:
    """Return a candidate with its groups scaled to the waves of this problem; unchanged if it has none."""
    options = dict(candidate.options)
    if GROUPS not in options:
        return candidate
    grouped = grouped_matmul(problem, target, candidate)
    partition = parse_partition(str(options[GROUPS]))
    if grouped is None:
        return replace(candidate, options=tuple((name, value) for name, value in candidate.options if name != GROUPS))
    waves = count_waves(grouped.tiles, grouped.per_wave, 1)
    fitted: Partition = partition if sum(partition) == waves else scale_partition(partition, waves)
    return replace(
        candidate, options=tuple((n, format_partition(fitted) if n == GROUPS else v) for n, v in candidate.options)
    )
