"""Problems and Plans from arguments and files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from msgspec import MsgspecError, convert
from msgspec.structs import replace

from overweave.errors import InputError, ScheduleFileError
from overweave.ir.dtype import Dtype
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Schedule
from overweave.ir.text.files import read_file
from overweave.ir.verify.plan import MachineLimits, verify_plan, verify_schedule
from overweave.ir.verify.rules.verdict import Verdict
from overweave.schedules.methods.registry import method_of
from overweave.schedules.tiles.order import tile_count, tile_orders

MAX_TILES = 2**22  # of a plan from a file
UNCHECKED_IN_SCHEDULES = (
    "of a schedule alone no engine, tile table, kernel's room on the GPU or operator's promise was checked"
)
# What `-o` may say of the problem; everything else is the schedule's.
PROBLEM_OPTIONS = ("m", "n", "k", "dtype", "b_is_transposed", "returns_gathered")


def options_of(words: Iterable[str]) -> dict[str, str]:
    """Return `["pieces=2", "order=ring"]` as key -> value. Raises InputError for a word without `=` or a duplicate
    key."""
    options: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or key in options:
            raise InputError(f"option {word[:60]!r}", "not a new key=value", "Write for example -o pieces=2")
        options[key] = value
    return options


def problem_of(name: str, world_size: int, options: dict[str, str]) -> tuple[Problem, dict[str, str]]:
    """Return the problem that the options describe, small by default, and the other options. Raises InputError for an
    unknown schedule and for a value that a Problem cannot have."""
    small = {"m": str(256 * world_size), "n": "512", "k": "128", "dtype": "bfloat16"}
    problem_options = {key: value for key, value in options.items() if key in PROBLEM_OPTIONS}
    fields = {"operator": method_of(name).operator, "world_size": world_size, **small, **problem_options}
    try:
        problem = convert(fields, Problem, strict=False)
    except MsgspecError as error:
        valid = f"Problem options: {', '.join(PROBLEM_OPTIONS)}; dtypes: {', '.join(get_args(Dtype))}"
        raise InputError(f"problem for {name}", str(error), valid) from None
    return problem, {key: value for key, value in options.items() if key not in PROBLEM_OPTIONS}


def load(path: Path) -> Schedule | Plan:
    """Return a file's schedule or plan, verified, with its tile tables. Raises ScheduleFileError and
    ScheduleRefused."""
    value = read_file(path)
    prove(value).raise_if_refused()
    return with_tile_orders(value) if isinstance(value, Plan) else value


def prove(value: Schedule | Plan) -> Verdict:
    """Return the verdict on a schedule; of a plan also on its engines, tables and numbers. Raises ScheduleFileError if
    the plan can have no tables."""
    if isinstance(value, Schedule):
        return replace(verify_schedule(value), notes=(UNCHECKED_IN_SCHEDULES,))
    # Tables are made of a proven schedule only: an untrusted one could have any number of tiles.
    verdict = verify_schedule(value.schedule)
    return verify_plan(with_tile_orders(value), MachineLimits()) if verdict.ok else verdict


def with_tile_orders(plan: Plan) -> Plan:
    """Return a plan of a proven schedule with tile tables; missing ones follow from schedule and realization. Raises
    ScheduleFileError if there can be none, or if they would be too large."""
    if plan.tile_orders:
        return plan
    request, cure = f"tile order of {plan.name}", "Give every queue an engine that can run it, and larger tiles"
    try:
        if tile_count(plan.schedule, plan.realization) > MAX_TILES:
            raise ScheduleFileError(request, f"more than {MAX_TILES} tiles", cure)
        return replace(plan, tile_orders=tile_orders(plan.schedule, plan.realization))
    except LookupError as error:
        raise ScheduleFileError(request, f"nothing known of {error}", cure) from None
