"""Tuning of one problem: the model names the best few, the one timer decides, and every rank ends with one answer.

Measured are the candidates that need no tile kernel of ours, whatever the model says of them, and those with one that
the model ranks first; then the best of these in the other tile shapes. Few rows are timed as captured graphs: that is
how decoding runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

from overweave.errors import MachineError
from overweave.ir.problem import Problem
from overweave.memory.board.board import Board
from overweave.tuner.measure.attempt import attempt, copied
from overweave.tuner.measure.baselines import planned
from overweave.tuner.measure.replay import captured, is_replayed, settled
from overweave.tuner.measure.sides import Call, Setting, Side
from overweave.tuner.measure.statistics import median
from overweave.tuner.measure.timer import Effort, compare
from overweave.tuner.model.rank import Weighed, cold_choice, machine_of, weigh
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
    trial = _Trial(asked, setting, effort)
    times = trial.measure(first, on_round)
    if not times:
        raise MachineError(f"tune {asked.operator}", f"nothing runs: {trial.left_out}", "See `overweave doctor`")
    again = _variations(times, asked, target)
    if again:
        times |= trial.measure([*again, min(times, key=lambda what: times[what])], on_round)
    rows = (Time(what.plan, dict(what.options), round(us, 3)) for what, us in times.items())
    tuned = Tuned(Entry(asked, tuple(sorted(rows, key=lambda row: row.us))), cold, trial.left_out)
    board.agree(f"tuned {asked}: {tuned.winner}".encode())
    board.finish()
    return tuned


def shortlist(weighed: tuple[Weighed, ...], operator: str, cold: Candidate | None = None) -> list[Candidate]:
    """What is worth measuring, in the order of the space; the model's own choice among it."""
    possible = [each for each in weighed if not each.obstacle]
    fused = [each for each in possible if each.candidate.is_fused(operator)]
    fused.sort(key=lambda each: each.predicted_us or 0.0)
    best = [cold, *(each.candidate for each in fused[:MOST_BY_MODEL])]
    return [each.candidate for each in possible if each.candidate in best or not each.candidate.is_fused(operator)]


def _cold(problem: Problem, target: Target) -> Candidate | None:
    """What a first call would take without any measurement; None where no machine is described."""
    if machine_of(target, problem.world_size) is None:
        return None
    return cold_choice(weigh(problem, target, is_thorough=False), problem).candidate


class _Trial:
    """One problem on this rank: its inputs, and what has been found out. left_out: why something was not timed."""

    def __init__(self, problem: Problem, setting: Setting, effort: Effort) -> None:
        self._setting, self._effort = setting, settled(effort, setting)
        self._side = Side(problem, setting)
        self._expected = copied(self._side.sequential(0))
        self._is_replayed = is_replayed(setting, problem.m)
        self.left_out: dict[str, str] = {}

    def measure(self, asked: Iterable[Candidate], on_round: OnRound | None) -> dict[Candidate, float]:
        """Medians in microseconds of those that run and are right."""
        calls = {what: call for what in asked if (call := self._usable(what)) is not None}
        if not calls:
            return {}
        turns = self._effort.rounds + self._effort.warmup

        def tell(turn: int) -> None:
            if on_round is not None:
                on_round((turn + 1) / turns)

        group, device = self._setting.group.process_group, self._setting.device
        samples = compare({str(what): calls[what] for what in calls}, device, group, self._effort, tell)
        return {what: median(samples.device_us[str(what)]) for what in calls}

    def _usable(self, what: Candidate) -> Call | None:
        call = planned(str(what))(self._side)
        why = attempt(call, self._expected, self._setting)
        if self._is_replayed and not why:
            call, why = captured(call, self._expected, self._setting)
        if why:
            self.left_out[str(what)] = why
        return None if why else call


def _variations(times: dict[Candidate, float], problem: Problem, target: Target) -> list[Candidate]:
    """The quickest plan with a tile kernel in other tile shapes, if that may still win."""
    fused = [what for what in times if what.is_fused(problem.operator)]
    best = min(fused, key=lambda what: times[what], default=None)
    if best is None or times[best] > WORTH_VARYING * min(times.values()):
        return []
    return [what for what in variations(best, problem, target) if what not in times]
