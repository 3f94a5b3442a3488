"""The choice of a Plan for a problem, with the reasons that `explain` shows.

In this order: measurements on this machine, measurements of the package, a neighbour's measurement, the model
(tuner/model/rank.py), and a rule by size if no machine is described. The library path is always a candidate: where
overlap loses, or a kernel cannot address the operands, it is chosen and the choice says so.
"""

from __future__ import annotations

from math import ceil

from msgspec.structs import replace

from overweave.ir.problem import Problem
from overweave.ir.tile_order import MULTIPLY
from overweave.schedules.catalog.catalog import build
from overweave.schedules.records.outside import OUTSIDE
from overweave.tuner.model.candidate_model import Weighed
from overweave.tuner.model.choice import Choice, default_plan, make_choice
from overweave.tuner.model.rank import cold_choice, rank_candidates
from overweave.tuner.space.space import Candidate, library_path, limit_pieces, reason_unsupported
from overweave.tuner.space.target import Target
from overweave.tuner.space.waves import fit_groups
from overweave.tuner.store.cache import knowledge
from overweave.tuner.store.table import Knowledge, TableMatch, ranked


def choose(problem: Problem, target: Target, knowledge_of_group: Knowledge | None = None) -> Choice:
    """Return the plan for a problem on a target, with reasons. known: the measurements of a group; None: those of the
    host."""
    if problem.world_size == 1 or not problem.m:
        why = "a group of one has nothing to overlap" if problem.m else "there are no rows"
        return make_choice(problem, target, library_path(problem.operator), ("rule", why))
    entry = (knowledge_of_group or knowledge(target, problem.world_size, problem.operator)).find(problem)
    measured = _by_measurement(problem, target, entry) if entry else None
    if measured is not None:
        return measured
    if target.machine(problem.world_size) is None:
        return default_plan(problem, target)
    return _by_model(problem, target)


def explain_choice(problem: Problem, target: Target) -> Choice:
    """Return the choice with all that is known of every candidate."""
    known = knowledge(target, problem.world_size, problem.operator)
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
    machine = str(target.found) if target.machine(problem.world_size) else ""
    weighed = (*weights.values(), *others)
    choice = replace(choice, rejected=rejected, weights=weighed, library=library, machine=machine)
    return replace(choice, tiles=wave_occupancy(choice, problem))


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
    """Return the choice of the model."""
    weighed = rank_candidates(problem, target, is_thorough=False)
    best = cold_choice(weighed, problem, target.found.doubt)
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
    waves = sum((row.width or config.block_n) / config.block_n / max(row.shares, 1) for row in tiles) / sms
    last = waves - ceil(waves) + 1
    words = (
        f"Tiles of {config.block_m} x {config.block_n} on {sms} SMs: {waves:.2f} waves, the last one {last:.0%} full"
    )
    if any(row.shares for row in tiles):
        return f"{words}, its tiles split along k."
    return f"{words}, some tiles in narrower parts." if any(row.width for row in tiles) else f"{words}."
