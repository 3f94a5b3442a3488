"""The choice of a Plan for a problem, with the reasons that `explain` shows.

In this order: measurements on this machine, measurements of the package, a neighbour's measurement, the model
(tuner/model/rank.py), and a rule by size if no machine is described. The library path is always a candidate: where
overlap loses, or a kernel cannot address the operands, it is chosen and the choice says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.problem import Problem
from overweave.ir.tile_order import MULTIPLY
from overweave.schedules.catalog.catalog import build
from overweave.schedules.records.option_sets import NOT_MEASURED
from overweave.schedules.records.outside import OUTSIDE
from overweave.tuner.model.candidate_model import State, Weighed
from overweave.tuner.model.rank import cold_choice, rank_candidates
from overweave.tuner.space.space import (
    Candidate,
    candidate,
    full_options,
    library_path,
    limit_pieces,
    reason_unsupported,
)
from overweave.tuner.space.target import Target, under_settings
from overweave.tuner.space.waves import fit_groups
from overweave.tuner.store.cache import ChoiceSource, Knowledge, TableMatch, knowledge, ranked


class Choice(Struct, frozen=True):
    """A schedule of the catalog with its options, or one of torch's operators; why it was chosen, and what was
    rejected.

    source: where the answer comes from. text: the choice as the operators' `plan=` takes it. weights: all candidates,
    if `explain` has ranked them. library: the library path among them, by its text. tiles: the occupancy of its
    matmul's tiles. machine: the described machine that predictions were made on. parted: which ranks lie on which of
    several islands.
    """

    plan: str
    options: dict[str, str | int]
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    source: ChoiceSource = "rule"
    text: str = ""
    weights: tuple[Weighed[str], ...] = ()
    library: str = ""
    tiles: str = ""
    machine: str = ""
    parted: str = ""

    def __str__(self) -> str:
        return "\n".join([*self.sentences(), *(line for _, line in self.rows())])

    def sentences(self) -> list[str]:
        """Return what runs and why, the source of its time, its gain, and counts of the candidates."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        runs = f"{self.plan} runs{f' with {options}' if options else ''}, because {self.reason}."
        rest = [*filter(None, [self.tiles]), SOURCES[self.source], *self._gain(), *candidate_counts(self.weights)]
        return [runs, *rest, *([f"Machine: {self.machine}."] if self.machine else []), *self._islands()]

    def rows(self) -> list[tuple[State, str]]:
        """Return one line for each candidate, with its times; the one that runs has an arrow."""
        width = max((len(weight.candidate) for weight in self.weights), default=0)
        lines = [
            (each.state, f"  {'->' if self._is_taken(each) else '  '} {each.line(width)}") for each in self.weights
        ]
        listed = {weight.candidate for weight in self.weights}
        rejected: list[tuple[State, str]] = [
            ("impossible", f"  not {name}: {why}") for name, why in self.rejected if name not in listed
        ]
        return lines + rejected

    def _islands(self) -> Iterator[str]:
        """Yield a sentence on groups of several islands: what may run there, and by how much it must win unmeasured."""
        if self.parted:
            margin = NOT_MEASURED.margin
            yield (
                f"Islands: {self.parted}: between them a library alone moves rows. What was not measured there must "
                f"gain {margin.us:.0f} us and {margin.share:.0%}, times the doubt of the machine."
            )

    def _gain(self) -> Iterator[str]:
        """Yield a sentence that compares the choice with the library path, by times of one kind."""
        choice = next((each for each in self.weights if self._is_taken(each)), None)
        library = next((each for each in self.weights if each.candidate == self.library and not each.obstacle), None)
        if choice is None or library is None or choice is library:
            return
        for word, ours_us, theirs_us in (
            ("Measured", choice.measured_us, library.measured_us),
            ("Simulated", choice.predicted_us, library.predicted_us),
        ):
            if ours_us and theirs_us:
                ratio = f"{theirs_us / ours_us:.2f} times as fast"
                yield f"{word}, it takes {ours_us:.1f} us and the library path {theirs_us:.1f} us: {ratio}."
                return

    def _is_taken(self, weight: Weighed[str]) -> bool:
        """Whether it is the chosen candidate, and not an impossible one of the same text."""
        return weight.candidate == self.text and not weight.obstacle


SOURCES: dict[ChoiceSource, str] = {
    "cache": "Its time was measured on this machine.",
    "table": "Its time was measured for the package on such a machine.",
    "nearest": "Its time was measured on the nearest known problem, not on this one.",
    "model": "Its time was simulated: nothing was measured.",
    "rule": "A rule decided: nothing was measured or simulated.",
    "asked": "The caller named it.",
}
_COUNTS: dict[State, str] = {
    "measured": "{} measured",
    "simulated": "{} simulated only",
    "impossible": "{} cannot run here",
    "unknown": "of {} nothing is known",
}


def candidate_counts(weights: Sequence[Weighed[Any]]) -> list[str]:
    """Return a sentence with the numbers of candidates that are measured, simulated, impossible; [] without any."""
    if not weights:
        return []
    counts = Counter(weight.state for weight in weights)
    parts = [words.format(counts[state]) for state, words in _COUNTS.items() if counts[state]]
    return [f"Candidates: {', '.join(parts)}."]


def make_choice(
    problem: Problem,
    target: Target,
    candidate: Candidate,
    because: tuple[ChoiceSource, str],
    rejected: tuple[tuple[str, str], ...] = (),
) -> Choice:
    """Return a candidate as the answer. because: its source and reason."""
    source, reason = because
    options = full_options(problem, target, candidate)
    return Choice(candidate.schedule(problem.operator), options, reason, rejected, source, str(candidate))


# The library path is a candidate here too: it is taken where overlap loses, or a kernel cannot address the operands.

# The least time of the plain calls at which overlap pays, and the rates of cuBLAS and NCCL for that estimate.
# MEASURED: eager calls of 256 to 8,192 rows of Llama-3 and mlp layers, W=4 (4 x H200, 2026-11-20): below about 115 us
# the overlapped plan's launches and flags cost more than the overlap gains.
PAYS_FROM_US, TFLOPS, WIRE_GB_PER_S = 115.0, 650.0, 250.0


def default_plan(problem: Problem, target: Target) -> Choice:
    """Return the plan for a problem on a target, with reasons."""
    rule = problem.record.size_rule
    sequential, overlapped = library_path(problem.operator), f"{problem.operator}.{rule.overlapped}"
    if target.parted:
        why = f"{target.parted} are several islands, and nothing was measured there"
        return make_choice(problem, target, sequential, ("rule", why))
    too_small = _too_small(problem) if target.kind != "cpu" else ""
    if too_small:
        why = "the plain library calls win at this size"
        return make_choice(problem, target, sequential, ("rule", why), ((overlapped, too_small),))
    if why_not := reason_unsupported(problem, target, candidate(rule.overlapped, {})):
        taken, why = candidate(rule.without_kernel, {}), "library matmuls take any layout"
        return make_choice(problem, target, taken, ("rule", why), ((overlapped, why_not),))
    if target.kind == "cpu":
        why = "on the CPU the overlapped schedule is emulated, whatever the size"
        return make_choice(problem, target, candidate(rule.overlapped, {}), ("rule", why))
    why = "copies hide behind the tiles of one kernel"
    return make_choice(problem, target, candidate(rule.overlapped, rule.options), ("rule", why))


def wire_bytes(problem: Problem) -> int:
    """Return the bytes that one rank receives: all moved rows but its own; of an all-reduce twice, as parts and as
    sums."""
    rows = problem.m * (2 if problem.record.shares_sums else 1)
    moved = rows * problem.moved_columns * ITEMSIZE_BYTES[problem.moved_dtype]
    return moved * (problem.world_size - 1) // problem.world_size


def predicted_us(problem: Problem) -> float:
    """Return the time of one cuBLAS matmul and one NCCL collective in sequence."""
    work = 2.0 * problem.m * problem.multiplied_columns * problem.k
    return work / TFLOPS / 1e6 + wire_bytes(problem) / WIRE_GB_PER_S / 1e3


def _too_small(problem: Problem) -> str:
    """Return why overlap does not pay; "" if it does."""
    plain_us = predicted_us(problem)
    if plain_us >= PAYS_FROM_US:
        return ""
    return f"the plain calls take about {plain_us:.0f} us, and overlap pays from {PAYS_FROM_US:.0f} us on"


def choose(problem: Problem, target: Target, knowledge_of_group: Knowledge | None = None) -> Choice:
    """Return the plan for a problem on a target, with reasons. known: the measurements of a group; None: those of the
    host."""
    if not problem.m or (problem.world_size == 1 and not problem.batch_invariant):
        why = "a group of one has nothing to overlap" if problem.m else "there are no rows"
        return make_choice(problem, target, library_path(problem.operator), ("rule", why))
    if problem.batch_invariant:
        return _in_one_order(problem, target)
    entry = (knowledge_of_group or knowledge(target, problem.world_size, problem.operator)).find(problem)
    measured = _by_measurement(problem, target, entry) if entry else None
    if measured is not None:
        return measured
    if target.machine(problem.world_size) is None:
        return default_plan(problem, target)
    return _by_model(problem, target)


SWITCHED_OFF = "ow.settings(batch_invariant=False)"


def _in_one_order(problem: Problem, target: Target) -> Choice:
    """Return the plan of a batch-invariant problem: of those with one order over k and over ranks, which all compute
    the same bits, the quickest predicted one; where nothing is predicted the one of the size rule, else the first.

    Raises InputError where there is none.
    """
    weighed = rank_candidates(problem, target, is_thorough=False)
    able = [each for each in weighed if not each.obstacle]
    # In a group of one, and on GPUs that no kernel is tuned for, others would be quicker, but in no one order.
    able = able or [each for each in weighed if not reason_unsupported(problem, target, each.candidate, "device")]
    asked = f"{problem.operator} of {problem.extents} {problem.dtype} under ow.settings(batch_invariant=True)"
    if not able:
        found = reason_unsupported(problem, target, candidate(problem.record.size_rule.overlapped, {}), "device")
        raise InputError(asked, found or "no plan has one order over k and ranks", f"Call under {SWITCHED_OFF}")
    usual = candidate(problem.record.size_rule.overlapped, {})
    best = min(able, key=lambda each: (each.us, each.candidate != usual))
    rejected = tuple((str(each.candidate), each.obstacle) for each in weighed if each.obstacle)
    what = "the quickest predicted" if best.predicted_us is not None else "the usual"
    why = f"calls are batch-invariant, and it is {what} plan of one order over k and over ranks"
    because: tuple[ChoiceSource, str] = ("rule" if best.predicted_us is None else "model", why)
    return make_choice(problem, target, best.candidate, because, rejected)


def explain_choice(problem: Problem, target: Target) -> Choice:
    """Return the choice with all that is known of every candidate."""
    problem, known = under_settings(problem), knowledge(target, problem.world_size, problem.operator)
    found = known.find(problem)
    times = {str(time.candidate): time.us for time in found.entry.times} if found else {}
    weights: dict[str, Weighed[str]] = {}
    impossible: dict[str, list[Candidate]] = {}
    for each in rank_candidates(problem, target):
        text = str(each.candidate)
        us = times.pop(text, None)
        if each.obstacle:  # mostly shared by all candidates of a schedule: one line for all
            why = f"{each.candidate.plan}: {each.obstacle}"
            impossible.setdefault(why, []).append(each.candidate)
            weights[why] = Weighed(_merged_text(impossible[why]), obstacle=each.obstacle)
        else:
            weights[text] = Weighed(text, each.predicted_us, measured_us=us)
    others = [Weighed(text, measured_us=us) for text, us in times.items()]
    choice = choose(problem, target, known)
    rejected = choice.rejected if choice.source == "rule" else ()  # the weights say it
    library = str(library_path(problem.operator))
    machine = target.machine_text if target.machine(problem.world_size) else ""
    weighed = (*weights.values(), *others)
    choice = replace(choice, rejected=rejected, weights=weighed, library=library, machine=machine)
    return replace(choice, parted=target.parted, tiles=wave_occupancy(choice, problem))


def _merged_text(candidates: list[Candidate]) -> str:
    """Return candidates of one schedule as one text: with the options that all of them have, and every value of
    each."""
    each = [dict(one.options) for one in candidates]
    shared = [name for name in each[0] if all(name in options for options in each)]
    values = [f"{name}={'|'.join(dict.fromkeys(str(options[name]) for options in each))}" for name in shared]
    return " ".join([candidates[0].plan, *values])


def _by_measurement(problem: Problem, target: Target, found: TableMatch) -> Choice | None:
    """Return the first candidate of an entry, as `ranked`, that can compute this problem, in fewer pieces if needed."""
    entry = found.entry
    fit = ((time, fit_groups(problem, target, limit_pieces(problem, time.candidate))) for time in entry.times)
    times = [replace(time, options=dict(what.options)) for time, what in fit]
    why = {str(time.candidate): reason_unsupported(problem, target, time.candidate) for time in times}
    able = ranked(problem.operator, (time for time in times if not why[str(time.candidate)]))
    if not able:
        return None
    best, least = able[0], min(able, key=lambda time: time.us)
    reason = f"it was the quickest of {len(entry.times)} at {entry.problem.extents}: {best.us:.1f} us"
    if best is not least:
        reason += f", but for {least.candidate}, {least.us:.1f} us, which costs the host more"
    if best not in entry.times:
        reason += ", in as many pieces as those rows have"
    return make_choice(
        problem, target, best.candidate, (found.source, reason), tuple((n, w) for n, w in why.items() if w)
    )


def _by_model(problem: Problem, target: Target) -> Choice:
    weighed = rank_candidates(problem, target, is_thorough=False)
    best = cold_choice(weighed, problem, target.found.doubt, bool(target.parted))
    rejected = tuple((str(each.candidate), each.obstacle) for each in weighed if each.obstacle)
    fitted = fit_groups(problem, target, best.candidate)
    return make_choice(problem, target, fitted, ("model", _reason(problem, best, weighed)), rejected)


def _reason(problem: Problem, best: Weighed[Candidate], weighed: tuple[Weighed[Candidate], ...]) -> str:
    """Return the predicted times that decided, in words."""
    predicted = {each.candidate: each.predicted_us for each in weighed if each.predicted_us is not None}
    library_us = predicted.pop(library_path(problem.operator))
    if not best.candidate.is_plain(problem.operator):
        return f"it is predicted to take {best.predicted_us:.1f} us, the library path {library_us:.1f} us"
    least = min(predicted, key=lambda what: predicted[what], default=None)
    others = ""
    if least:
        judged = "too little gained to trust" if predicted[least] < library_us else "which is slower"
        others = f", and {least} {predicted[least]:.1f} us, {judged}"
    return f"the library path is predicted to take {library_us:.1f} us{others}"


def wave_occupancy(choice: Choice, problem: Problem) -> str:
    """Return the first rank's tile shape, the number of waves of its tiles, and how full the last one is, as a
    sentence. "" for a plan without a tile kernel, or for a CPU."""
    if choice.plan in OUTSIDE or "sms" not in choice.options:
        return ""
    plan = build(choice.plan, problem, choice.options, rank=0)
    config, rows = plan.realization.matmul, [row for order in plan.tile_orders for row in order.rows]
    tiles = [row for row in rows if row.kind == MULTIPLY]
    if config is None or not tiles:
        return ""
    sms = int(choice.options["sms"]) - plan.sms_beside
    waves = sum((row.width or config.block_n) / config.block_n for row in tiles) / sms
    last = waves - ceil(waves) + 1
    words = (
        f"Tiles of {config.block_m} x {config.block_n} on {sms} SMs: {waves:.2f} waves, the last one {last:.0%} full"
    )
    return f"{words}, some tiles in narrower parts." if any(row.width for row in tiles) else f"{words}."
