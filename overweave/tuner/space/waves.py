"""Partitions of waves as candidates, by Algorithm 1, for every method whose tiles are summed group by group.

They depend on a problem's number of waves, so they are not in the fixed space. A partition that was measured for one
problem is scaled to another in proportion to its waves.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from overweave.hardware.machine import Machine
from overweave.ir.problem import Problem
from overweave.ir.shards import shard_rows
from overweave.schedules.catalog.catalog import matmul_config
from overweave.schedules.families.wave_groups import count_waves, wave_tiles
from overweave.schedules.methods.registry import methods_for
from overweave.schedules.records.record import Method
from overweave.tuner.space.partition_search import (
    Partition,
    WaveCosts,
    WaveGroups,
    best_partitions,
    format_partition,
    parse_partition,
    scale_partition,
    wave_costs,
)
from overweave.tuner.space.space import Candidate, MethodFamily, full_options, reason_unsupported
from overweave.tuner.space.target import Target

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
