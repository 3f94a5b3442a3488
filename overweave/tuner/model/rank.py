"""Which candidate the model takes, before anything is measured: each is simulated on the described machine.

The library path wins unless another is predicted to gain more than what the model is known to miss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.machine import Machine, load
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.outside import OUTSIDE
from overweave.schedules.tiles.shape import reduction_shape
from overweave.sim.cost import library_matmul_us
from overweave.sim.order import tiles_of
from overweave.sim.simulate import total_us
from overweave.tuner.model.weigh import Model, Weighed
from overweave.tuner.space.space import (
    Candidate,
    candidates,
    families,
    full_options,
    library_path,
    obstacle,
)
from overweave.tuner.space.target import Target
from overweave.tuner.space.waves import regrouped, wave_families
from overweave.tuner.store.table import bucketed

MACHINES = {"NVIDIA H200": "h200x4"}
# What is simulated, since a first call must not wait long: elements of the products of all ranks, tiles of what kernels
# sum, or gather, which fewer candidates do; and no fewer rows.
MOST_ELEMENTS, MOST_SUMMED, MOST_GATHERED, FEWEST_ROWS = 1 << 28, 1 << 16, 1 << 19, 2048
MOST_GPUS = 8  # of one host, all on one switch: a described machine of fewer stands for it


def machine_of(target: Target, world_size: int) -> Machine | None:
    """The description that a target's predictions are made on, if there is one."""
    name = MACHINES.get(target.name)
    if target.kind != "cuda" or name is None or world_size > MOST_GPUS:
        return None
    machine = load(name)
    return replace(machine, gpus=max(machine.gpus, world_size))


def weigh(problem: Problem, target: Target, is_thorough: bool = True) -> tuple[Weighed[Candidate], ...]:
    """Every candidate in the order of the space. Predictions are those of the problem's bucket, made once.

    is_thorough: simulate them all; else, as a first call does, go from the first of each family that is not far behind
    to its best, option by option. Both say the same of a candidate.
    """
    return _weigh(bucketed(problem), target, is_thorough)


def cold_choice(weighed: tuple[Weighed[Candidate], ...], problem: Problem) -> Weighed[Candidate]:
    """The quickest by prediction, less what the library path is given ahead. Raises InputError if not even that can."""
    library = next(each for each in weighed if each.candidate.is_plain(problem.operator))
    if library.predicted_us is None:
        raise InputError(f"choose a plan of {problem.operator}", library.obstacle, "Split the problem, or name a plan")
    base_us = library.predicted_us
    return min(weighed, key=lambda each: each.us + _ahead_us(each.candidate, problem, base_us))


def _ahead_us(what: Candidate, problem: Problem, base_us: float) -> float:
    """What the library path, which takes base_us, is given ahead of a candidate."""
    if what.is_plain(problem.operator):
        return 0.0
    margin = what.margin(problem)
    return margin.us + margin.share * base_us


def predict_us(problem: Problem, target: Target, what: Candidate, machine: Machine) -> float:
    """The time of a call, simulated; for torch's all-reduces, a library matmul and what was measured of them."""
    if what.is_by_torch:
        size_bytes = problem.m * problem.n * ITEMSIZE_BYTES[problem.result_dtype]
        matmul_us = library_matmul_us(machine, (problem.m, problem.n, problem.k), problem.dtype)
        sum_us = machine.collective_us(OUTSIDE[what.plan].curve, problem.world_size, size_bytes)
        return matmul_us + sum_us - machine.latency.call.us
    return total_us(build(what.schedule(problem.operator), problem, full_options(problem, target, what)), machine)


@lru_cache(maxsize=1024)
def _weigh(problem: Problem, target: Target, is_thorough: bool) -> tuple[Weighed[Candidate], ...]:
    def ahead_us(what: Candidate) -> float:
        return _ahead_us(what, problem, model(library_path(problem.operator)).predicted_us or 0.0)

    model: Model[Candidate] = Model(predictor(problem, target), lambda what: obstacle(problem, target, what), ahead_us)
    machine = machine_of(target, problem.world_size)
    waves = () if machine is None else tuple(wave_families(problem, target, machine, is_thorough))
    known = (*candidates(problem.operator), *(member for family in waves for member in family.members()))
    if is_thorough:
        return tuple(map(model, known))
    model.explore((*families(problem.operator), *waves))
    return tuple(map(model.unasked, known))


def predictor(problem: Problem, target: Target) -> Callable[[Candidate], float | None]:
    """The time of a candidate by the model, None where nothing is known of it.

    Of a large problem only some rows are simulated, for all candidates alike, and the time is scaled up.
    """
    machine, simulated = machine_of(target, problem.world_size), problem
    while _is_large(simulated, target.sms) and simulated.m > FEWEST_ROWS:
        simulated = replace(simulated, m=problem.record.whole_rows(simulated.m // 2, problem.world_size))

    def predict(what: Candidate) -> float | None:
        """torch's operators have no schedule, and only some have a measured curve."""
        if machine is None:
            return None
        if what.is_by_torch and not machine.has_measured(OUTSIDE[what.plan].curve, problem.world_size):
            return None
        what = regrouped(simulated, target, what)
        return predict_us(simulated, target, what, machine) * problem.m / max(simulated.m, 1)

    return predict


def _is_large(problem: Problem, sms: int) -> bool:
    cols, most = problem.moved_columns, MOST_GATHERED if problem.record.gathers else MOST_SUMMED
    tile = reduction_shape(problem.m, cols, sms)
    tiles = problem.world_size * tiles_of(problem.m, cols, tile.block_m, tile.block_n)
    return problem.world_size * problem.m * problem.n > MOST_ELEMENTS or tiles > most
