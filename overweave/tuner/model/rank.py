"""Which candidate the model takes, before anything is measured: each is simulated on the described machine.

The library path wins unless another is predicted to gain more than what the model is known to miss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import inf

from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.machine import Machine
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.pause_gc import without_collection
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS
from overweave.schedules.records.outside import OUTSIDE
from overweave.schedules.tiles.shape import reduction_shape
from overweave.sim.cost import library_matmul_us
from overweave.sim.link_floor import busiest_link
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

# What is simulated, since a first call must not wait long: elements of the products of all ranks, and tiles of what
# kernels gather, or sum, which more candidates do; and no fewer rows. MEASURED: a choice takes 0.1 to 0.5 s of a
# processor (campaigns.choice_by_machine).
MOST_ELEMENTS, MOST_GATHERED, MOST_ADDED, MOST_SUMMED, FEWEST_ROWS = 1 << 28, 1 << 19, 3 << 26, 1 << 16, 2048


# Where `CLOSER` times fewer rows are simulated, so many plans that take at most `NEAR` times the quickest one's time
# are simulated whole, too. Of yet larger problems a choice would take too long.
FINALISTS, NEAR, CLOSER = 2, 1.35, 2


def weigh(problem: Problem, target: Target, is_thorough: bool = True) -> tuple[Weighed[Candidate], ...]:
    """Every candidate in the order of the space. Predictions are those of the problem's bucket, made once.

    is_thorough: simulate them all; else, as a first call does, go from the first of each family that is not far behind
    to its best, option by option. Both say the same of a candidate.
    """
    return _weigh(bucketed(problem), target, is_thorough, tuple(METHODS))


def cold_choice(weighed: tuple[Weighed[Candidate], ...], problem: Problem, doubt: float = 1.0) -> Weighed[Candidate]:
    """The quickest, as `judged_us` judges it. Raises InputError if not even the library path can.

    doubt: of the machine that was predicted on (hardware/cards.py).
    """
    library = next(each for each in weighed if each.candidate.is_plain(problem.operator))
    if library.predicted_us is None:
        raise InputError(f"choose a plan of {problem.operator}", library.obstacle, "Split the problem, or name a plan")
    base_us = library.predicted_us
    return min(weighed, key=lambda each: judged_us(each.candidate, each.us, (problem, base_us, doubt)))


def judged_us(what: Candidate, us: float, beside: tuple[Problem, float, float]) -> float:
    """A candidate's time and what the library path is given ahead of it. beside: the problem, what the library path
    takes, and the doubt of the machine.

    On a machine that nobody measured a candidate must gain so many times as much; between those that do, margins that
    measurements of another machine gave say nothing, and the quickest by prediction is taken.
    """
    problem, base_us, doubt = beside
    if what.is_plain(problem.operator):
        return us
    margin = what.margin(problem)
    ahead_us = margin.us + margin.share * base_us
    if doubt <= 1.0:
        return us + ahead_us
    return us if us + doubt * ahead_us <= base_us else inf


def predict_us(
    problem: Problem, target: Target, what: Candidate, machine: Machine, limit_us: float = inf
) -> float | None:
    """The time of a call, simulated; for torch's all-reduces, a library matmul and what was measured of them. None, and
    sooner told, where bytes alone keep a link busy for longer than a limit.
    """
    if what.is_by_torch:
        size_bytes = problem.m * problem.n * ITEMSIZE_BYTES[problem.result_dtype]
        matmul_us = library_matmul_us(machine, (problem.m, problem.n, problem.k), problem.dtype)
        sum_us = machine.collective_us(OUTSIDE[what.plan].curve, problem.world_size, size_bytes)
        return matmul_us + sum_us - machine.latency.call.us
    plan = build(what.schedule(problem.operator), problem, full_options(problem, target, what))
    return None if busiest_link(plan, machine)[0] > limit_us else total_us(plan, machine)


def forget() -> None:
    """What was weighed is weighed anew."""
    _weigh.cache_clear()


@lru_cache(maxsize=1024)
def _weigh(
    problem: Problem, target: Target, is_thorough: bool, registered: tuple[str, ...]
) -> tuple[Weighed[Candidate], ...]:
    """registered: the names of all methods, so that what is registered later is weighed, too."""

    def handicap(what: Candidate) -> float:
        base_us = model(library_path(problem.operator)).predicted_us or 0.0
        return 0.0 if target.found.doubt > 1.0 else judged_us(what, 0.0, (problem, base_us, 1.0))

    model: Model[Candidate] = Model(predictor(problem, target), lambda what: obstacle(problem, target, what), handicap)
    machine = target.machine(problem.world_size)
    waves = () if machine is None else tuple(wave_families(problem, target, machine, is_thorough))
    known = (*candidates(problem.operator), *(member for family in waves for member in family.members()))
    with without_collection():  # tables have some hundred thousand rows, through which it would look in vain
        if is_thorough:
            first = {each.candidate: each for each in _weigh(problem, target, False, registered)}
            model.known.update({what: each for what, each in first.items() if each.predicted_us is not None})
            return tuple(map(model, known))
        model.explore((*families(problem.operator), *waves))
        _look_closer(model, problem, target)
    return tuple(map(model.unasked, known))


def _look_closer(model: Model[Candidate], problem: Problem, target: Target) -> None:
    """Where half of a problem is simulated, the quickest of each plan that may be the quickest of all, whole.

    In part a plan looks slower than it is: what it does before its first tile and behind its last, and a wave of tiles
    that does not fill the GPU, count as often as there are parts. MEASURED: without this look the choice for MLP-4's
    all-reduce of eight ranks is 0.868 of the best on h100x8 (python -m campaigns.choice_by_machine).
    """
    if problem.m != CLOSER * _fewer_rows(problem, target):
        return
    library = library_path(problem.operator)
    base_us = model(library).us
    by_plan: dict[str, Weighed[Candidate]] = {}
    for each in sorted(model.known.values(), key=lambda one: one.us):
        if each.us < inf and each.candidate != library:
            by_plan.setdefault(each.candidate.plan, each)
    quickest = list(by_plan.values())[:FINALISTS]
    least_us = min([base_us, *(each.us for each in quickest)])
    rivals = [each.candidate for each in quickest if each.us <= NEAR * least_us]
    may_win = len(rivals) + (base_us <= NEAR * least_us)
    if rivals and may_win > 1:
        model.predict_anew((library, *rivals), predictor(problem, target, is_whole=True))


def predictor(problem: Problem, target: Target, is_whole: bool = False) -> Callable[[Candidate, float], float | None]:
    """The time of a candidate by the model, None where nothing is known of it.

    Of a large problem only some rows are simulated, for all candidates alike, and the time is scaled up; is_whole: all.
    """
    machine = target.machine(problem.world_size)
    simulated = problem if is_whole else replace(problem, m=_fewer_rows(problem, target))

    def predict(what: Candidate, limit_us: float = inf) -> float | None:
        """torch's operators have no schedule, and only some have a measured curve."""
        if machine is None:
            return None
        if what.is_by_torch and not machine.has_measured(OUTSIDE[what.plan].curve, problem.world_size):
            return None
        what = regrouped(simulated, target, what)
        share = simulated.m / max(problem.m, 1)
        us = predict_us(simulated, target, what, machine, limit_us * share)
        return None if us is None else us / share

    return predict


def _fewer_rows(problem: Problem, target: Target) -> int:
    """How many rows of a problem are simulated in a first look."""
    while _is_large(problem, target.sms) and problem.m > FEWEST_ROWS:
        problem = replace(problem, m=problem.record.whole_rows(problem.m // 2, problem.world_size))
    return problem.m


def _is_large(problem: Problem, sms: int) -> bool:
    cols, gathers = problem.moved_columns, problem.record.gathers
    tile = reduction_shape(problem.m, cols, sms)
    ranks = problem.world_size
    tiles = ranks * tiles_of(problem.m, cols, tile.block_m, tile.block_n)
    gathered = MOST_ELEMENTS * max(1, ranks // 4)  # copies of more ranks take as long, whatever their rows
    most_elements, most_tiles = (gathered, MOST_GATHERED) if gathers else (MOST_ADDED, MOST_SUMMED)
    return ranks * problem.m * problem.n > most_elements or tiles > most_tiles
