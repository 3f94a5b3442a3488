"""Tuning of one problem: the model picks the best few, the timer decides, and all ranks end with one answer.

Measured are all candidates that need no tile kernel of ours, and those with one that the model ranks first; then the
best of these in the other tile shapes. Problems of few rows are timed as captured graphs, as decoding runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from msgspec import Struct

from overweave.errors import MachineError
from overweave.ir.problem import Problem
from overweave.memory.board.board import Board
from overweave.tuner.measure.baselines import BenchSide, Setting
from overweave.tuner.measure.timer import Effort, is_replayed, with_graph_warmup
from overweave.tuner.measure.trial import Named, TimedTrial
from overweave.tuner.model.candidate_model import Weighed
from overweave.tuner.model.rank import cold_choice, rank_candidates
from overweave.tuner.space.space import Candidate, variations
from overweave.tuner.space.target import Target
from overweave.tuner.store.cache import Entry, Time, bucket_problem, ranked

EFFORT = Effort(rounds=15, warmup=3, host_calls=0)
MOST_BY_MODEL = 4
WORTH_VARYING = 1.15  # tile shapes are varied for plans at most this factor slower than the best

OnRound = Callable[[float], None]


class Tuned(Struct, frozen=True):
    """The result: the entry for the cache, the model's choice, and what could not run and why."""

    entry: Entry
    cold: Candidate | None
    left_out: dict[str, str]

    @property
    def winner(self) -> Candidate:
        return ranked(self.entry.problem.operator, self.entry.times)[0].candidate

    @property
    def cold_share(self) -> float | None:
        """Return the speed of the model's choice over the winner's; None if the choice was not measured."""
        times = {time.candidate: time.us for time in self.entry.times}
        return self.entry.times[0].us / times[self.cold] if self.cold in times else None


def tune_problem(
    problem: Problem, setting: Setting, target: Target, effort: Effort = EFFORT, on_round: OnRound | None = None
) -> Tuned:
    """Measure a problem's bucket. Collective. on_round: called with the fraction that is done. Raises RankMismatch on
    every rank if ranks tune different things, PeerError, and MachineError if not even the library path runs."""
    bucket = bucket_problem(problem)
    weighed = rank_candidates(bucket, target)
    cold = _cold(bucket, target)
    first = shortlist(weighed, bucket.operator, cold)
    board = Board.of(setting.group)
    board.agree(f"tune {bucket} among {', '.join(map(str, first))}".encode())
    side = BenchSide(bucket, setting)
    as_graphs = is_replayed(setting.device, bucket.m)
    trial = TimedTrial(setting, with_graph_warmup(effort, setting.device), side.sequential(0), as_graphs)

    def measure(candidates_to_time: Iterable[Candidate]) -> dict[Candidate, float]:
        return trial.medians({each: partial(side.ours, plan=str(each)) for each in candidates_to_time}, on_round)

    times = search(measure, first, lambda times: _variations(times, bucket, target))
    if not times:
        raise MachineError(f"tune {bucket.operator}", f"nothing runs: {trial.left_out}", "See `overweave doctor`")
    rows = (Time(candidate.plan, dict(candidate.options), round(us, 3)) for candidate, us in times.items())
    tuned = Tuned(Entry(bucket, tuple(rows)), cold, trial.left_out)
    board.agree(f"tuned {bucket}: {tuned.winner}".encode())
    board.finish()
    return tuned


def search(
    measure: Callable[[Iterable[Named]], dict[Named, float]],
    first: Iterable[Named],
    vary: Callable[[dict[Named, float]], Iterable[Named]],
    finalists: int = 0,
) -> dict[Named, float]:
    """Return the measured times, the fastest first: of `first`, of what `vary` makes of these, and of the fastest few
    once more, side by side, which come first. measure: returns the times of those that run, the fastest first."""
    times = measure(first)
    if times and (varied := list(vary(times))):
        times |= measure([*varied, next(iter(times))])
        times = dict(sorted(times.items(), key=lambda item: item[1]))
    last = measure(list(times)[:finalists]) if finalists and times else {}
    return last | {what: us for what, us in times.items() if what not in last}


def shortlist(weighed: tuple[Weighed[Candidate], ...], operator: str, cold: Candidate | None = None) -> list[Candidate]:
    """Return the candidates to measure, in the order of the space, the model's own choice among them."""
    possible = [each for each in weighed if not each.obstacle]
    fused = [each for each in possible if each.candidate.is_fused(operator)]
    fused.sort(key=lambda each: each.predicted_us or 0.0)
    best = [cold, *(each.candidate for each in fused[:MOST_BY_MODEL])]
    return [each.candidate for each in possible if each.candidate in best or not each.candidate.is_fused(operator)]


def _cold(problem: Problem, target: Target) -> Candidate | None:
    """Return the choice of a first call without measurements; None if no machine is described."""
    if target.machine(problem.world_size) is None:
        return None
    return cold_choice(
        rank_candidates(problem, target, is_thorough=False), problem, target.found.doubt, bool(target.parted)
    ).candidate


def _variations(times: dict[Candidate, float], problem: Problem, target: Target) -> list[Candidate]:
    """Return the fastest plan with a tile kernel in other tile shapes, if one of these may still win."""
    fused = [candidate for candidate in times if candidate.is_fused(problem.operator)]
    best = min(fused, key=lambda candidate: times[candidate], default=None)
    if best is None or times[best] > WORTH_VARYING * min(times.values()):
        return []
    return [candidate for candidate in variations(best, problem, target) if candidate not in times]
