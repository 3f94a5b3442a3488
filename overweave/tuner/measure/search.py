"""Tuning of one problem: the model names the best few, the one timer decides, and every rank ends with one answer.

Measured are the candidates that need no tile kernel of ours, whatever the model says of them, and those with one that
the model ranks first; then the best of these in the other tile shapes. Few rows are timed as captured graphs: that is
how decoding runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from msgspec import Struct

from overweave.errors import MachineError
from overweave.ir.problem import Problem
from overweave.memory.board.board import Board
from overweave.tuner.measure.replay import is_replayed, settled
from overweave.tuner.measure.sides import BenchSide, Setting
from overweave.tuner.measure.statistics import median
from overweave.tuner.measure.timer import Effort
from overweave.tuner.measure.trial import TimedTrial
from overweave.tuner.model.rank import cold_choice, weigh
from overweave.tuner.model.weigh import Weighed
from overweave.tuner.space.space import Candidate, variations
from overweave.tuner.space.target import Target
from overweave.tuner.store.table import Entry, Time, bucketed, ranked

EFFORT = Effort(rounds=15, warmup=3, host_calls=0)
MOST_BY_MODEL = 4
WORTH_VARYING = 1.15  # how much slower than the best a plan may be whose tile shapes are still tried

OnRound = Callable[[float], None]


class Tuned(Struct, frozen=True):
    """What came out: the entry for the cache, what the model would have taken, and what could not run and why."""

    entry: Entry
    cold: Candidate | None
    left_out: dict[str, str]

    @property
    def winner(self) -> Candidate:
        return ranked(self.entry.problem.operator, self.entry.times)[0].candidate

    @property
    def cold_share(self) -> float | None:
        """Speed of the model's choice as a share of the winner's; None where that was not measured."""
        times = {time.candidate: time.us for time in self.entry.times}
        return self.entry.times[0].us / times[self.cold] if self.cold in times else None


def tune_problem(
    problem: Problem, setting: Setting, target: Target, effort: Effort = EFFORT, on_round: OnRound | None = None
) -> Tuned:
    """Measures a problem's bucket. Collective. `on_round` is told which part is done.

    Raises RankMismatch on every rank where ranks tune different things, PeerError, and MachineError if not even the
    library path runs.
    """
    asked = bucketed(problem)
    weighed = weigh(asked, target)
    cold = _cold(asked, target)
    first = shortlist(weighed, asked.operator, cold)
    board = Board.of(setting.group)
    board.agree(f"tune {asked} among {', '.join(map(str, first))}".encode())
    side = BenchSide(asked, setting)
    as_graphs = is_replayed(setting.device, asked.m)
    trial = TimedTrial(setting, settled(effort, setting.device), side.sequential(0), as_graphs)
    times = _medians(trial, side, first, on_round)
    if not times:
        raise MachineError(f"tune {asked.operator}", f"nothing runs: {trial.left_out}", "See `overweave doctor`")
    again = _variations(times, asked, target)
    if again:
        times |= _medians(trial, side, [*again, min(times, key=lambda what: times[what])], on_round)
    rows = (Time(what.plan, dict(what.options), round(us, 3)) for what, us in times.items())
    tuned = Tuned(Entry(asked, tuple(sorted(rows, key=lambda row: row.us))), cold, trial.left_out)
    board.agree(f"tuned {asked}: {tuned.winner}".encode())
    board.finish()
    return tuned


def shortlist(weighed: tuple[Weighed[Candidate], ...], operator: str, cold: Candidate | None = None) -> list[Candidate]:
    """What is worth measuring, in the order of the space; the model's own choice among it."""
    possible = [each for each in weighed if not each.obstacle]
    fused = [each for each in possible if each.candidate.is_fused(operator)]
    fused.sort(key=lambda each: each.predicted_us or 0.0)
    best = [cold, *(each.candidate for each in fused[:MOST_BY_MODEL])]
    return [each.candidate for each in possible if each.candidate in best or not each.candidate.is_fused(operator)]


def _cold(problem: Problem, target: Target) -> Candidate | None:
    """What a first call would take without any measurement; None where no machine is described."""
    if target.machine(problem.world_size) is None:
        return None
    return cold_choice(weigh(problem, target, is_thorough=False), problem, target.found.doubt).candidate


def _medians(
    trial: TimedTrial, side: BenchSide, asked: Iterable[Candidate], on_round: OnRound | None
) -> dict[Candidate, float]:
    """In microseconds, of those that run and are right."""
    candidates = {str(what): what for what in asked}
    calls = {name: partial(side.ours, plan=name) for name in candidates}
    samples = trial.times(calls, on_round=on_round).device_us
    return {candidates[name]: median(values) for name, values in samples.items()}


def _variations(times: dict[Candidate, float], problem: Problem, target: Target) -> list[Candidate]:
    """The quickest plan with a tile kernel in other tile shapes, if that may still win."""
    fused = [what for what in times if what.is_fused(problem.operator)]
    best = min(fused, key=lambda what: times[what], default=None)
    if best is None or times[best] > WORTH_VARYING * min(times.values()):
        return []
    return [what for what in variations(best, problem, target) if what not in times]
