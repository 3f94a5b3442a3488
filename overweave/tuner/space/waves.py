"""Partitions of waves as candidates: of every method whose tiles are summed group by group, those of Algorithm 1.

They depend on a problem's number of waves, and so are no part of the fixed space. A partition that was found for one
problem serves a near one by the shares that its groups have of the waves.
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
    Grouped,
    Partition,
    WaveCosts,
    best_partitions,
    costs_on,
    partition_of,
    stretched,
    words_of,
)
from overweave.tuner.space.space import Candidate, MethodFamily, full_options, obstacle
from overweave.tuner.space.target import Target

GROUPS, LIBRARY_SMS = "groups", "library_sms"
MOST_WAVES = 128  # that are searched: of more, these are partitioned, and the groups stretched
PLAIN_SMS = 16  # that tiles leave to the library where no machine says how many it takes


def wave_families(problem: Problem, target: Target, machine: Machine, is_thorough: bool) -> Iterator[MethodFamily]:
    """The best partitions of each method, if Algorithm 1 says that they gain more than its margin; or anyway."""
    for method in methods_for(problem.operator):
        if not method.takes(GROUPS):
            continue
        library_sms = machine.sharing.collective.sms
        base = Candidate(method.name, ((LIBRARY_SMS, library_sms),))
        grouped = None if obstacle(problem, target, base) else tiles_of(problem, target, base)
        if grouped is None:
            continue
        waves = count_waves(grouped.tiles, grouped.per_wave, 1)
        grouped = replace(grouped, tiles=min(grouped.tiles, MOST_WAVES * grouped.per_wave))
        costs = costs_on(machine, grouped)
        found = best_partitions(costs)
        if is_thorough or _gains(found[0][0], costs, grouped, method, problem, target):
            words = tuple(dict.fromkeys(words_of(stretched(partition, waves)) for _, partition in found))
            yield MethodFamily(method.name, {GROUPS: words, LIBRARY_SMS: (library_sms,)})


def _gains(
    predicted_us: float, costs: WaveCosts, grouped: Grouped, method: Method, problem: Problem, target: Target
) -> bool:
    """Whether a prediction is below that of the matmul on all SMs and its collective, by the method's margin, which
    grows by the doubt of the machine.
    """
    waves = -(-grouped.tiles // target.sms)
    plain_us, margin = waves * costs.wave_us + costs.last_us[-1], method.margin(problem, {})
    return predicted_us + target.found.doubt * (margin.us + margin.share * plain_us) < plain_us


def tiles_of(problem: Problem, target: Target, what: Candidate) -> Grouped | None:
    """The waves of a candidate on a problem; None where its shards have different numbers of them, or none."""
    options, record = full_options(problem, target, what), problem.record
    config = matmul_config(what.schedule(problem.operator), problem, options)
    ranks = problem.world_size
    shards = [(0, problem.m)] if record.shares_sums else [shard_rows(problem.m, ranks, rank) for rank in range(ranks)]
    heights = {-(-(hi - lo) // config.block_m) for lo, hi in shards}
    sms = int(options.get("sms", target.sms)) - int(options.get(LIBRARY_SMS, PLAIN_SMS))
    if ranks == 1 or len(heights) > 1 or not problem.m or sms < 1:
        return None
    return Grouped(
        tiles=len(shards) * max(heights) * -(-problem.n // config.block_n),
        per_wave=wave_tiles(sms, len(shards)),
        config=config,
        k=problem.k,
        dtype=problem.dtype,
        # Machines have no curves of all-to-alls: as much leaves a rank in an all-gather.
        function="all_reduce" if record.shares_sums else "reduce_scatter" if record.adds else "all_gather",
        world_size=ranks,
    )


def regrouped(problem: Problem, target: Target, what: Candidate) -> Candidate:
    """A candidate with its groups stretched to the waves of this problem: as it is, if it has none."""
    options = dict(what.options)
    if GROUPS not in options:
        return what
    grouped = tiles_of(problem, target, what)
    partition = partition_of(str(options[GROUPS]))
    if grouped is None:
        return replace(what, options=tuple((name, value) for name, value in what.options if name != GROUPS))
    waves = count_waves(grouped.tiles, grouped.per_wave, 1)
    fitted: Partition = partition if sum(partition) == waves else stretched(partition, waves)
    return replace(what, options=tuple((n, words_of(fitted) if n == GROUPS else v) for n, v in what.options))
