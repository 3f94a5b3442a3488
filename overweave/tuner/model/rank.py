"""The model's choice before anything is measured: each candidate is simulated on the described machine.

The library path wins unless another candidate is predicted to gain more than the model's known error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import inf

from msgspec import UNSET, Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.machine import Machine
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.pause_gc import without_collection
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS
from overweave.schedules.records.option_sets import NOT_MEASURED
from overweave.schedules.records.outside import OUTSIDE
from overweave.schedules.records.record import Margin
from overweave.schedules.tiles.shape import reduction_shape
from overweave.sim.alike import ranks_to_simulate
from overweave.sim.cost import library_matmul_us
from overweave.sim.order import tiles_of
from overweave.sim.simulate import total_us
from overweave.tuner.model.candidate_model import Model, Weighed
from overweave.tuner.space.space import (
    Candidate,
    candidates,
    families,
    full_options,
    library_path,
    reason_unsupported,
)
from overweave.tuner.space.target import Target
from overweave.tuner.space.waves import fit_groups, wave_families
from overweave.tuner.store.cache import bucket_problem

# Limits of a simulation, since a first call must not wait long: elements of the products of all ranks, and tiles of
# gathers, and of sums, which have more candidates; and the least rows. MEASURED: a choice takes 0.1 to 0.5 s of a
# processor (campaigns.choice_by_machine).
MOST_ELEMENTS, MOST_GATHERED, MOST_ADDED, MOST_SUMMED, FEWEST_ROWS = 1 << 28, 1 << 19, 3 << 26, 1 << 16, 2048


# If a problem is simulated with RESIMULATED times fewer rows, up to FINALISTS plans within a factor NEAR of the fastest
# are simulated whole, too. For larger problems that would take too long.
FINALISTS, NEAR, RESIMULATED = 2, 1.35, 2


def rank_candidates(problem: Problem, target: Target, is_thorough: bool = True) -> tuple[Weighed[Candidate], ...]:
    """Return every candidate in the order of the space, with predictions for the problem's bucket, which are cached.

    is_thorough: simulate them all; else, as in a first call, search from the first of each family that is not far
    behind to its best, option by option. Both predict the same for a candidate. Of a batch-invariant problem they are
    predicted as of another one, in tiles for its rows.
    """
    usual = replace(problem, batch_invariant=UNSET)
    ranked = _rank_candidates(bucket_problem(usual), target, is_thorough, tuple(METHODS))
    return tuple(_held_to(problem, target, each) for each in ranked) if problem.batch_invariant else ranked


def _held_to(problem: Problem, target: Target, weighed: Weighed[Candidate]) -> Weighed[Candidate]:
    """Return a candidate that a problem refuses without a prediction."""
    why = weighed.obstacle or reason_unsupported(problem, target, weighed.candidate)
    return replace(weighed, predicted_us=None, obstacle=why) if why else weighed


class Baseline(Struct, frozen=True):
    """What candidates are held against: the library path's time for a problem. doubt: of the machine that was predicted
    on (hardware/cards.py). spans_islands: between islands, where no plan was ever measured."""

    problem: Problem
    us: float
    doubt: float = 1.0
    spans_islands: bool = False


def cold_choice(
    weighed: tuple[Weighed[Candidate], ...], problem: Problem, doubt: float = 1.0, spans_islands: bool = False
) -> Weighed[Candidate]:
    """Choose by predicted times alone, without a measurement of this problem: the least `handicapped_us`.

    doubt: factor on the margins that candidates must gain over the library path, above 1 on a machine on which nothing
    was measured. spans_islands: whether ranks of the group do not reach each other's memory. Raises InputError if not
    even the library path can run.
    """
    library = next(each for each in weighed if each.candidate.is_plain(problem.operator))
    if library.predicted_us is None:
        raise InputError(f"choose a plan of {problem.operator}", library.obstacle, "Split the problem, or name a plan")
    baseline = Baseline(problem, library.predicted_us, doubt, spans_islands)
    return min(weighed, key=lambda each: handicapped_us(each.candidate, each.us, baseline))


def handicapped_us(candidate: Candidate, us: float, baseline: Baseline) -> float:
    """Return a candidate's time plus the margin that it must gain over the library path.

    On a machine that was not measured the margin is multiplied by the doubt; candidates that gain it are compared
    without it, since margins come from another machine's measurements.
    """
    gain_us = _required_gain_us(candidate, baseline)
    if baseline.doubt <= 1.0:
        return us + gain_us
    return us if us + gain_us <= baseline.us else inf


def _required_gain_us(candidate: Candidate, baseline: Baseline) -> float:
    """Return by how much a candidate must be ahead of the library path, which itself owes nothing."""
    operator = baseline.problem.operator
    if candidate == library_path(operator) or (candidate.is_plain(operator) and not baseline.spans_islands):
        return 0.0
    margin, unmeasured = candidate.margin(baseline.problem), NOT_MEASURED.margin
    if baseline.spans_islands:
        margin = Margin(max(margin.us, unmeasured.us), max(margin.share, unmeasured.share))
    return max(baseline.doubt, 1.0) * (margin.us + margin.share * baseline.us)


def predict_us(
    problem: Problem, target: Target, candidate: Candidate, machine: Machine, limit_us: float = inf
) -> float | None:
    """Return the simulated time of a call; of torch's all-reduces, that of a cuBLAS matmul and the measured curve.
    None, without a simulation, if bytes alone keep a link busy for longer than `limit_us`."""
    if candidate.is_by_torch:
        size_bytes = problem.m * problem.n * ITEMSIZE_BYTES[problem.result_dtype]
        matmul_us = library_matmul_us(machine, (problem.m, problem.n, problem.k), problem.dtype)
        sum_us = machine.collective_us(OUTSIDE[candidate.plan].curve, problem.world_size, size_bytes)
        return matmul_us + sum_us - machine.latency.call.us
    options, only = full_options(problem, target, candidate), ranks_to_simulate(machine, problem.world_size)
    plan = build(candidate.schedule(problem.operator), problem, options, only=only)
    us = total_us(plan, machine, limit_us=limit_us)
    return None if us == inf else us


def clear_predictions() -> None:
    """Clear the cache of predictions."""
    _rank_candidates.cache_clear()


@lru_cache(maxsize=1024)
def _rank_candidates(
    problem: Problem, target: Target, is_thorough: bool, registered: tuple[str, ...]
) -> tuple[Weighed[Candidate], ...]:
    """Return `rank_candidates`. registered: the names of all methods, so that a later registration is not cached
    away."""

    doubt = target.found.doubt

    def baseline() -> Baseline:
        return Baseline(problem, model(library_path(problem.operator)).us, doubt, bool(target.parted))

    def handicap(candidate: Candidate) -> float:
        return 0.0 if doubt > 1.0 else handicapped_us(candidate, 0.0, baseline())

    def shortfall(candidate: Candidate, us: float) -> float:
        return 0.0 if doubt <= 1.0 else max(0.0, us + _required_gain_us(candidate, baseline()) - baseline().us)

    obstacle = partial(reason_unsupported, problem, target)
    model: Model[Candidate] = Model(predictor(problem, target), obstacle, handicap, shortfall)
    machine = target.machine(problem.world_size)
    waves = () if machine is None else tuple(wave_families(problem, target, machine, is_thorough))
    every = (*candidates(problem.operator), *(member for family in waves for member in family.members()))
    with without_collection():  # a collection would scan hundreds of thousands of table rows for nothing
        if is_thorough:
            first = {each.candidate: each for each in _rank_candidates(problem, target, False, registered)}
            model.results.update({what: each for what, each in first.items() if each.predicted_us is not None})
            return tuple(map(model, every))
        if doubt > 1.0:  # all others are held against the library path, which is simulated quickly
            model.predict_again((library_path(problem.operator),), predictor(problem, target, is_whole=True))
        model.explore((*families(problem.operator), *waves))
        _resimulate_finalists(model, problem, target, shortfall)
    return tuple(map(model.without_prediction, every))


def _resimulate_finalists(
    model: Model[Candidate], problem: Problem, target: Target, shortfall: Callable[[Candidate, float], float]
) -> None:
    """Simulate the whole problem for the fastest of each plan that may win, if only half of it was simulated.

    shortfall: as of the model.

    In part a plan looks slower than it is: time before its first tile and behind its last, and a partly filled wave of
    tiles, count once for each part. MEASURED: without this the choice for MLP-4's all-reduce of eight ranks is 0.868 of
    the best on h100x8 (python -m campaigns.choice_by_machine).
    """
    if problem.m != RESIMULATED * _simulated_rows(problem, target):
        return
    library = library_path(problem.operator)
    base_us = model(library).us
    by_plan: dict[str, Weighed[Candidate]] = {}
    for each in sorted(model.results.values(), key=lambda one: (shortfall(one.candidate, one.us), one.us)):
        if each.us < inf and each.candidate != library:
            by_plan.setdefault(each.candidate.plan, each)
    quickest = list(by_plan.values())[:FINALISTS]
    least_us = min([base_us, *(each.us for each in quickest)])
    rivals = [each.candidate for each in quickest if each.us <= NEAR * least_us]
    # On a machine that was not measured a plan must gain so much that the library path is near in any case.
    may_win = len(rivals) + (base_us <= NEAR * least_us or target.found.doubt > 1.0)
    if rivals and may_win > 1:
        model.predict_again((library, *rivals), predictor(problem, target, is_whole=True))


def predictor(problem: Problem, target: Target, is_whole: bool = False) -> Callable[[Candidate, float], float | None]:
    """Return the function that predicts a candidate's time, None if nothing is known of it. Of a large problem only
    some rows are simulated, for all candidates alike, and the time is scaled up; is_whole: all."""
    machine = target.machine(problem.world_size)
    simulated = problem if is_whole else replace(problem, m=_simulated_rows(problem, target))

    def predict(candidate: Candidate, limit_us: float = inf) -> float | None:
        """Return the time, None if unknown: torch's operators have no schedule, and only some a measured curve."""
        if machine is None:
            return None
        if candidate.is_by_torch and not machine.has_measured(OUTSIDE[candidate.plan].curve, problem.world_size):
            return None
        candidate = fit_groups(simulated, target, candidate)
        share = simulated.m / problem.m if problem.m else 1.0
        us = predict_us(simulated, target, candidate, machine, limit_us * share)
        return None if us is None else us / share

    return predict


def _simulated_rows(problem: Problem, target: Target) -> int:
    machine = target.machine(problem.world_size)
    ranks = len(ranks_to_simulate(machine, problem.world_size)) if machine is not None else 0
    while _is_large(problem, target.sms, ranks or problem.world_size) and problem.m > FEWEST_ROWS:
        problem = replace(problem, m=problem.record.whole_rows(problem.m // 2, problem.world_size))
    return problem.m


def _is_large(problem: Problem, sms: int, ranks: int) -> bool:
    """Whether a simulation of so many ranks of the problem would take too long for a first call."""
    cols, gathers = problem.moved_columns, problem.record.gathers
    tile = reduction_shape(problem.m, cols, sms)
    tiles = ranks * tiles_of(problem.m, cols, tile.block_m, tile.block_n)
    gathered = MOST_ELEMENTS * max(1, ranks // 4)  # simulating copies takes as long for any number of rows
    most_elements, most_tiles = (gathered, MOST_GATHERED) if gathers else (MOST_ADDED, MOST_SUMMED)
    return ranks * problem.m * problem.n > most_elements or tiles > most_tiles
