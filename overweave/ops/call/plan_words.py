"""The plan that a caller names in words: `push`, or `push pieces=4`."""

from __future__ import annotations

from overweave.errors import InputError
from overweave.schedules.methods.registry import method_of
from overweave.schedules.records.options import settle
from overweave.schedules.records.outside import OUTSIDE
from overweave.tuner.space.space import Candidate, candidate

LONGEST_SHOWN = 80


def candidate_of(operator: str, words: str) -> Candidate:
    """What the words ask of an operator: a plan by its short or full name, with its options as they were written.

    Raises InputError for what cannot be read, a schedule that is unknown, and options or values that it has not.
    """
    name, *pairs = words.split() or [""]
    options: dict[str, str | int] = {}
    for pair in pairs:
        option, separator, value = pair.partition("=")
        if not separator or option in options:
            shown = option[:LONGEST_SHOWN]
            found = f"{shown} is given twice" if separator else f"{shown!r} is no option"
            raise InputError(f"plan {words[:LONGEST_SHOWN]!r}", found, "Write NAME option=value ...")
        options[option] = value
    asked = candidate(name.removeprefix(f"{operator}."), options)
    if asked.plan not in OUTSIDE:
        full = asked.schedule(operator)
        settle(full, method_of(full).options, options)
    return asked
