"""Which Plan a problem gets, and the reasons, which `explain` tells.

In this order: what was measured on this machine, what was measured for the package, a neighbour's measurement, the
model (tuner/model/rank.py), and a rule by size where no machine is described. The library path is always a candidate:
where overlap loses, or a kernel cannot address the operands, it is taken and the choice says so. Nothing falls back
silently.
"""

from __future__ import annotations

from math import ceil

from msgspec.structs import replace

from overweave.ir.problem import Problem
from overweave.ir.tile_order import MULTIPLY
from overweave.schedules.catalog.catalog import build
from overweave.schedules.records.outside import OUTSIDE
from overweave.tuner.model.choice import Choice, chosen
from overweave.tuner.model.rank import cold_choice, weigh
from overweave.tuner.model.size_rule import by_size
from overweave.tuner.model.weigh import Weighed
from overweave.tuner.space.space import Candidate, fitted, library_path, obstacle
from overweave.tuner.space.target import Target
from overweave.tuner.space.waves import regrouped
from overweave.tuner.store.cache import knowledge
from overweave.tuner.store.table import Knowledge, TableMatch, ranked


def choose(problem: Problem, target: Target, known: Knowledge | None = None) -> Choice:
    """The plan for a problem on a target, with reasons. known: what a group agreed on; None: what the host knows."""
    if problem.world_size == 1 or not problem.m:
        why = "a group of one has nothing to overlap" if problem.m else "there are no rows"
        return chosen(problem, target, library_path(problem.operator), ("rule", why))
    found = (known or knowledge(target, problem.world_size, problem.operator)).find(problem)
    measured = _by_measurement(problem, target, found) if found else None
    if measured is not None:
        return measured
    if target.machine(problem.world_size) is None:
        return by_size(problem, target)
    return _by_model(problem, target)


def explained(problem: Problem, target: Target) -> Choice:
    """The choice together with all that is known of every candidate."""
    known = knowledge(target, problem.world_size, problem.operator)
    found = known.find(problem)
    times = {str(time.candidate): time.us for time in found.entry.times} if found else {}
    weights: dict[str, Weighed[str]] = {}
    kept_back: dict[str, list[Candidate]] = {}
    for each in weigh(problem, target):
        text = str(each.candidate)
        us = times.pop(text, None)
        if each.obstacle:  # what keeps a schedule back mostly keeps back all of its candidates: told once
            why = f"{each.candidate.plan}: {each.obstacle}"
            kept_back.setdefault(why, []).append(each.candidate)
            weights[why] = Weighed(_together(kept_back[why]), obstacle=each.obstacle)
        else:
            weights[text] = Weighed(text, each.predicted_us, measured_us=us)
    others = [Weighed(text, measured_us=us) for text, us in times.items()]
    choice = choose(problem, target, known)
    rejected = choice.rejected if choice.source == "rule" else ()  # the weights tell
    library = str(library_path(problem.operator))
    machine = str(target.found) if target.machine(problem.world_size) else ""
    weighed = (*weights.values(), *others)
    choice = replace(choice, rejected=rejected, weights=weighed, library=library, machine=machine)
    return replace(choice, tiles=filled(choice, problem))


def _together(those: list[Candidate]) -> str:
    """Candidates of one schedule as one: with the options that all of them have, and every value of each."""
    each = [dict(one.options) for one in those]
    shared = [name for name in each[0] if all(name in options for options in each)]
    values = [f"{name}={'|'.join(dict.fromkeys(str(options[name]) for options in each))}" for name in shared]
    return " ".join([those[0].plan, *values])


def _by_measurement(problem: Problem, target: Target, found: TableMatch) -> Choice | None:
    """The first candidate of an entry, as `ranked`, that can compute this very problem; in fewer pieces if need be."""
    entry = found.entry
    fit = ((time, regrouped(problem, target, fitted(problem, time.candidate))) for time in entry.times)
    times = [replace(time, options=dict(what.options)) for time, what in fit]
    why = {str(time.candidate): obstacle(problem, target, time.candidate) for time in times}
    able = ranked(problem.operator, (time for time in times if not why[str(time.candidate)]))
    if not able:
        return None
    taken, least = able[0], min(able, key=lambda time: time.us)
    reason = f"it was the quickest of {len(entry.times)} at {entry.problem.extents}: {taken.us:.1f} us"
    if taken is not least:
        reason += f", but for {least.candidate}, {least.us:.1f} us, which costs the host more"
    if taken not in entry.times:
        reason += ", in as many pieces as those rows have"
    return chosen(problem, target, taken.candidate, (found.source, reason), tuple((n, w) for n, w in why.items() if w))


def _by_model(problem: Problem, target: Target) -> Choice:
    weighed = weigh(problem, target, is_thorough=False)
    taken = cold_choice(weighed, problem, target.found.doubt)
    rejected = tuple((str(each.candidate), each.obstacle) for each in weighed if each.obstacle)
    what = regrouped(problem, target, taken.candidate)
    return chosen(problem, target, what, ("model", _reason(problem, taken, weighed)), rejected)


def _reason(problem: Problem, taken: Weighed[Candidate], weighed: tuple[Weighed[Candidate], ...]) -> str:
    predicted = {each.candidate: each.predicted_us for each in weighed if each.predicted_us is not None}
    library_us = predicted.pop(library_path(problem.operator))
    if not taken.candidate.is_plain(problem.operator):
        return f"it is predicted to take {taken.predicted_us:.1f} us, the library path {library_us:.1f} us"
    least = min(predicted, key=lambda what: predicted[what], default=None)
    others = ""
    if least:
        judged = "too little gained to trust" if predicted[least] < library_us else "which is slower"
        others = f", and {least} {predicted[least]:.1f} us, {judged}"
    return f"the library path is predicted to take {library_us:.1f} us{others}"


# How the tiles of a plan's matmul fill a GPU, in a sentence for `explain`.


def filled(choice: Choice, problem: Problem) -> str:
    """The tile shape of the first rank, in how many waves its tiles run, and how full the last one is; nothing of a
    plan without a tile kernel, or for a CPU.
    """
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
        return f"{words}, its tiles dealt out along k."
    return f"{words}, some tiles in narrower parts." if any(row.width for row in tiles) else f"{words}."
