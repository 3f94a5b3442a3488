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
from overweave.ir.problem import Problem
from overweave.memory.pause_gc import without_collection
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.outside import OUTSIDE
from overweave.schedules.tiles.shape import reduction_shape
from overweave.sim.cost import library_matmul_us
from overweave.sim.order import tiles_of
from overweave.sim.simulate import total_us
from overweave.tuner.space.space import (
    Candidate,
    Family,
    candidate,
    candidates,
    families,
    full_options,
    library_path,
    obstacle,
)
from overweave.tuner.space.target import Target
from overweave.tuner.store.table import bucketed

MACHINES = {"NVIDIA H200": "h200x4"}
# What is simulated, since a first call must not wait long: elements of the products of all ranks, tiles of what kernels
# sum, or gather, which fewer candidates do; and no fewer rows.
MOST_ELEMENTS, MOST_SUMMED, MOST_GATHERED, FEWEST_ROWS = 1 << 28, 1 << 16, 1 << 19, 2048
REACH = 1.2  # how far behind the quickest the first of a family may be for the others to be looked at
MOST_GPUS = 8  # of one host, all on one switch: a described machine of fewer stands for it


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
    library = next(each for each in weighed if each.candidate.is_plain(problem.operator))
    if library.predicted_us is None:
        raise InputError(f"choose a plan of {problem.operator}", library.obstacle, "Split the problem, or name a plan")
    base_us = library.predicted_us
    return min(predicted, key=lambda each: _handicapped_us(each, problem, base_us))


def _handicapped_us(each: Weighed, problem: Problem, base_us: float) -> float:
    """The prediction, and what the library path, which takes base_us, is given ahead."""
    if each.candidate.is_plain(problem.operator):
        return _us(each)
    margin = each.candidate.margin(problem)
    return _us(each) + margin.us + margin.share * base_us


def predict_us(problem: Problem, target: Target, what: Candidate, machine: Machine) -> float:
    """The time of a call, simulated; for torch's all-reduces, a library matmul and what was measured of them."""
    if what.is_by_torch:
        size_bytes = problem.m * problem.n * ITEMSIZE_BYTES[problem.result_dtype]
        matmul_us = library_matmul_us(machine, (problem.m, problem.n, problem.k), problem.dtype)
        sum_us = machine.collective_us(OUTSIDE[what.plan].curve, problem.world_size, size_bytes)
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
        base_us = self.weighed(library_path(self._problem.operator)).predicted_us or 0.0
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
        return not what.is_by_torch or self._machine.has_measured(OUTSIDE[what.plan].curve, self._problem.world_size)


def _is_large(problem: Problem, sms: int) -> bool:
    cols, most = problem.moved_columns, MOST_GATHERED if problem.record.gathers else MOST_SUMMED
    tile = reduction_shape(problem.m, cols, sms)
    tiles = problem.world_size * tiles_of(problem.m, cols, tile.block_m, tile.block_n)
    return problem.world_size * problem.m * problem.n > MOST_ELEMENTS or tiles > most


def _us(each: Weighed) -> float:
    assert each.predicted_us is not None
    return each.predicted_us
