"""Which candidate the model takes, before anything is measured: each is simulated on the described machine.

The library path wins unless another is predicted to gain more than what the model is known to miss.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError, ScheduleError
from overweave.hardware.machine import Machine, load
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import Problem
from overweave.ir.verify.plan import MachineLimits
from overweave.memory.collector import without_collection
from overweave.schedules.catalog import build
from overweave.schedules.tile_shape import has_second_wave, reduction_shape
from overweave.sim.cost import library_matmul_us, tiles_of
from overweave.sim.simulate import total_us
from overweave.tuner.space import (
    RING_STORED,
    SCATTER_PULL,
    SEQUENTIAL,
    STORED,
    TORCH_ONE_SHOT,
    TORCH_TWO_SHOT,
    Candidate,
    Family,
    candidate,
    candidates,
    families,
    full_options,
    obstacle,
)
from overweave.tuner.table import bucketed
from overweave.tuner.target import Target

MACHINES = {"NVIDIA H200": "h200x4"}
# What torch's own all-reduces are in a machine's description; its fused operators have no prediction.
TORCHS = {TORCH_ONE_SHOT: "one_shot_all_reduce", TORCH_TWO_SHOT: "two_shot_all_reduce"}
# What is simulated, since a first call must not wait long: elements of the products of all ranks, tiles of what kernels
# sum, or gather, which fewer candidates do; and no fewer rows.
MOST_ELEMENTS, MOST_SUMMED, MOST_GATHERED, FEWEST_ROWS = 1 << 28, 1 << 16, 1 << 19, 2048
REACH = 1.2  # how far behind the quickest the first of a family may be for the others to be looked at
MOST_GPUS = 8  # of one host, all on one switch: a described machine of fewer stands for it


class Margin(Struct, frozen=True):
    """What a plan must be predicted to gain over the library path before it is taken unmeasured."""

    us: float
    share: float


# Fixed costs of small calls that the simulation misses; plans of many library calls also cost the
# host 100 us and more.
# MEASURED: on 72 rows (small and mlp, W=2 and 4) the choice loses less than 1 % in the mean, and 3 to 5 % without these
# margins (H200, 2026-11-20; `python -m campaigns.cold_choice`).
# torch's own all-reduces stand behind the library path's matmul, cost the host less, and have measured times: how long
# the call is gives no reason for a margin. MEASURED: of the 82 rows of *.matmul_all_reduce.*.json the 43 in which
# torch's two-shot is predicted to gain more than 1 us are all quicker with it.
WITH_KERNELS, OF_LIBRARY, BY_TORCH = Margin(10.0, 0.02), Margin(25.0, 0.03), Margin(1.0, 0.0)
# A gather of two ranks whose shards the library multiplies by one weight. Its call costs the host 59 us if its tensors
# come back, and 212 us if not (benchmarks/results/host_cost.h200x2.2026-11-23.txt), which the GPU mostly needs itself.
# MEASURED: of some 120 rows of *.all_gather_matmul.*.json the choice reaches 0.996 of the quickest in the mean, and
# 0.992 with the margin of other plans of library calls. Of four ranks it was measured where shards are long alone.
OF_SHARDS_OF_TWO = Margin(5.0, 0.01)
# Packed messages. MEASURED: with 2 us the choice for an all-reduce is the quickest, or within 4 % of it, on all 20
# problems of 1 to 512 rows of benchmarks/results/packed.h200x2.2026-11-22.txt, and the quickest on all 32 of the two
# other operators in packed_gather_scatter.*; of 4 ranks on 57 of the 60 of packed.h200x4.*, within 4.3 % on the others
# (captured; tests/tuner/test_messages.py).
OF_MESSAGES = Margin(2.0, 0.0)
# All-reduces by finished parts. MEASURED: on layers of 1,024 to 8,192 rows those whose own tiles add what arrived take
# 6 to 23 % more than predicted, those whose sums are a kernel's 0 to 7 % (4 x H200,
# benchmarks/results/llm_layers.matmul_all_reduce.h200x4.2026-11-22.json, and prefill.* of the same day). With these
# margins no choice is one that was measured behind the library.
OF_SUMMING_KERNELS, OF_ADDING_TILES = Margin(10.0, 0.035), Margin(20.0, 0.06)
# Tiles that store at peers. MEASURED: `python -m campaigns.sim_accuracy` of own_sums.* finds all-reduces round a ring
# whose shards have a second wave of tiles predicted 8 % too short to 2 % too long, on two H200s and on four, and no
# more than 31 us too short; those with one wave 31 % too short to 12 % too long, and up to 91 us too short, for there
# each hop waits for the one before. Reduce-scatters of stored.* are predicted 4 to 19 % too short on four.
OF_SUMS_IN_A_RING, OF_STORES = Margin(25.0, 0.02), Margin(75.0, 0.04)
# Sums that pull beside tiles: not measured. As much as the worst of what else tiles and peers share is given.
OF_PULLS = OF_STORES
# Of two H200s sim_accuracy of rings.* finds reduce-scatters round a ring no more than 34 us too short, and 16 %, but
# for the one in whole tiles that takes half ones now; own tiles that add no more than 36 us, but 23 %. With these
# margins no choice is one that was measured behind the library (campaigns.cold_choice, of the same files).
OF_RINGS_OF_TWO, OF_OWN_SUMS = Margin(15.0, 0.01), Margin(30.0, 0.02)


class Weighed(Struct, frozen=True):
    """A candidate with what the model says of it: its time, or why it cannot be; neither if it can only be measured."""

    candidate: Candidate
    predicted_us: float | None = None
    obstacle: str = ""


def machine_of(target: Target, world_size: int) -> Machine | None:
    """The description that a target's predictions are made on, if there is one."""
    name = MACHINES.get(target.name)
    if target.kind != "cuda" or name is None or world_size > MOST_GPUS:
        return None
    machine = load(name)
    return replace(machine, gpus=max(machine.gpus, world_size))


def weigh(problem: Problem, target: Target, is_thorough: bool = True) -> tuple[Weighed, ...]:
    """Every candidate in the order of the space. Predictions are those of the problem's bucket, made once.

    is_thorough: simulate them all; else, as a first call does, go from the first of each family that is not far behind
    to its best, option by option. Both say the same of a candidate.
    """
    return _weigh(bucketed(problem), target, is_thorough)


def cold_choice(weighed: tuple[Weighed, ...], problem: Problem) -> Weighed:
    """The quickest by prediction, less what the library path is given ahead. Raises InputError if not even that can."""
    predicted = [each for each in weighed if each.predicted_us is not None]
    library = next(each for each in weighed if each.candidate.plan == SEQUENTIAL)
    if library.predicted_us is None:
        raise InputError(f"choose a plan of {problem.operator}", library.obstacle, "Split the problem, or name a plan")
    base_us = library.predicted_us
    return min(predicted, key=lambda each: _handicapped_us(each, problem, base_us))


def _handicapped_us(each: Weighed, problem: Problem, base_us: float) -> float:
    """The prediction, and what the library path, which takes base_us, is given ahead."""
    if each.candidate.plan == SEQUENTIAL:
        return _us(each)
    margin = _margin(each.candidate, problem)
    return _us(each) + margin.us + margin.share * base_us


def _margin(what: Candidate, problem: Problem) -> Margin:
    operator = problem.operator
    if what.plan in STORED:
        return _margin_of_stores(what, problem)
    if what.plan == SCATTER_PULL:
        return OF_PULLS
    if problem.record.shares_sums and "sums" in dict(what.options):
        return OF_ADDING_TILES if dict(what.options)["sums"] == "epilogue" else OF_SUMMING_KERNELS
    if dict(what.options).get("sums") == "epilogue":
        return OF_OWN_SUMS
    if what.has_messages(operator):
        return OF_MESSAGES
    if what.is_by_torch:
        return BY_TORCH
    if problem.record.gathers and (what.plan, problem.world_size, len(problem.widths)) == ("per_shard", 2, 1):
        return OF_SHARDS_OF_TWO
    return WITH_KERNELS if what.has_kernels(operator) else OF_LIBRARY


def _margin_of_stores(what: Candidate, problem: Problem) -> Margin:
    if what.plan != RING_STORED:
        return OF_STORES
    is_of_two = problem.world_size == 2
    if problem.record.shares_sums:
        has_time = has_second_wave(problem.m, problem.n, problem.world_size, MachineLimits().sms)
        return OF_SUMS_IN_A_RING if has_time or is_of_two else OF_STORES
    return OF_RINGS_OF_TWO if is_of_two else OF_STORES


def predict_us(problem: Problem, target: Target, what: Candidate, machine: Machine) -> float:
    """The time of a call, simulated; for torch's all-reduces, a library matmul and what was measured of them."""
    if what.is_by_torch:
        size_bytes = problem.m * problem.n * ITEMSIZE_BYTES[problem.result_dtype]
        matmul_us = library_matmul_us(machine, (problem.m, problem.n, problem.k), problem.dtype)
        sum_us = machine.collective_us(TORCHS[what.plan], problem.world_size, size_bytes)
        return matmul_us + sum_us - machine.latency.call.us
    return total_us(build(what.schedule(problem.operator), problem, full_options(problem, target, what)), machine)


@lru_cache(maxsize=1024)
def _weigh(problem: Problem, target: Target, is_thorough: bool) -> tuple[Weighed, ...]:
    model = _Model(problem, target)
    known = families(problem.operator)
    if is_thorough:
        return tuple(model.weighed(what) for what in candidates(problem.operator))
    heads = [model.weighed(next(family.members())) for family in known]
    least_us = min((model.judged_us(head) for head in heads if head.predicted_us is not None), default=0.0)
    for family, head in zip(known, heads, strict=True):
        if head.predicted_us is not None and model.judged_us(head) <= REACH * least_us:
            model.descend(family)
    return tuple(model.known.get(what) or model.unasked(what) for what in candidates(problem.operator))


class _Model:
    """What the model says of one problem, each candidate asked at most once.

    Of a large one only some rows are simulated, for all candidates alike, and the time is scaled up.
    """

    def __init__(self, problem: Problem, target: Target) -> None:
        self._problem, self._target, self._simulated = problem, target, problem
        while _is_large(self._simulated, target.sms) and self._simulated.m > FEWEST_ROWS:
            self._simulated = replace(self._simulated, m=self._simulated.m // 2)
        self._machine = machine_of(target, problem.world_size)
        self.known: dict[Candidate, Weighed] = {}

    def weighed(self, what: Candidate) -> Weighed:
        if what not in self.known:
            self.known[what] = self._weighed(what)
        return self.known[what]

    def unasked(self, what: Candidate) -> Weighed:
        """What can be said without a simulation."""
        return Weighed(what, None, obstacle(self._problem, self._target, what))

    def judged_us(self, each: Weighed) -> float:
        """As the choice judges it."""
        base_us = self.weighed(candidate(SEQUENTIAL, {})).predicted_us or 0.0
        return _handicapped_us(each, self._problem, base_us)

    def descend(self, family: Family) -> None:
        """From the first member, one option after the other, to the value that is best with the others as they are."""
        best = self.weighed(next(family.members()))
        for name, values in family.grid.items():
            tried = [self.weighed(candidate(family.plan, dict(best.candidate.options) | {name: v})) for v in values]
            best = min((each for each in tried if each.predicted_us is not None), key=self.judged_us, default=best)

    def _weighed(self, what: Candidate) -> Weighed:
        known = self.unasked(what)
        if known.obstacle or self._machine is None or not self._has_model(what):
            return known
        try:
            with without_collection():  # tables have some hundred thousand rows, through which it would look in vain
                us = predict_us(self._simulated, self._target, what, self._machine)
            return Weighed(what, us * self._problem.m / max(self._simulated.m, 1))
        except (InputError, ScheduleError) as error:
            return Weighed(what, None, f"{error.asked}: {error.found}")

    def _has_model(self, what: Candidate) -> bool:
        """Whether a time can be predicted: torch's operators have no schedule, and only some have a measured curve."""
        assert self._machine is not None
        measured = self._machine.has_measured(TORCHS.get(what.plan, ""), self._problem.world_size)
        return measured or not what.is_by_torch


def _is_large(problem: Problem, sms: int) -> bool:
    cols, most = problem.moved_columns, MOST_GATHERED if problem.record.gathers else MOST_SUMMED
    tile = reduction_shape(problem.m, cols, sms)
    tiles = problem.world_size * tiles_of(problem.m, cols, tile.block_m, tile.block_n)
    return problem.world_size * problem.m * problem.n > MOST_ELEMENTS or tiles > most


def _us(each: Weighed) -> float:
    assert each.predicted_us is not None
    return each.predicted_us
