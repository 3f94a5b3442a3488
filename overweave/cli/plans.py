"""Problems and Plans from arguments and files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import typer
from msgspec import MsgspecError, convert
from msgspec.structs import replace

from overweave.compiler.frontend.symbols.directives import SHAPE
from overweave.errors import InputError, ScheduleFileError
from overweave.ir.dtype import Dtype
from overweave.ir.operators.record import Operator
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import LIMIT, Schedule
from overweave.ir.text.files import read_file
from overweave.ir.verify.plan import MachineLimits, verify_plan, verify_schedule
from overweave.ir.verify.rules.verdict import Verdict
from overweave.schedules.methods.registry import method_of
from overweave.schedules.tiles.order import tile_count, tile_orders
from overweave.tuner.space.shapes import ShapeCase

SHAPE_HELP = "M,N,K of the global matmul, before tensor parallelism; M,N1+N2,K of several weights"
AFTER_HELP = "What happens to the product: bias+silu+residual, gate+silu, residual+rms_norm, ..."


def case_of(shape: str, after: str = "", least_rows: int = 0) -> ShapeCase:
    """Return the case of `M,N,K` or `M,N1+N2,K`. Raises InputError."""
    words = [word.strip() for word in shape.split(",")]
    m, columns, k = (words[0], words[1].split("+"), words[2]) if len(words) == 3 else ("", [], "")
    are_sizes = bool(columns) and all(_is_size(word, 1) for word in (*columns, k)) and _is_size(m, least_rows)
    if not are_sizes:
        found = f"not three numbers, m {least_rows} to {LIMIT}, n and k 1 to {LIMIT}"
        raise InputError(f"shape {shape[:60]!r}", found, "Write for example --shape 8192,14336,4096")
    widths = tuple(map(int, columns))
    name = f"{m}x{'+'.join(columns)}x{k}{f' {after}' if after else ''}"
    return ShapeCase(name, int(m), sum(widths), int(k), widths if len(widths) > 1 else (), after)


def _is_size(word: str, least: int) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 11 and least <= int(word) <= LIMIT


def report_rounding(operator: Operator, case: ShapeCase, world_size: int) -> None:
    """Print to the error stream how a shape that ranks do not divide is rounded up."""
    wholes = {"m": (case.m,), "n": case.columns or (case.n,), "k": (case.k,)}
    for whole in wholes[operator.split] if operator.split else ():
        if whole % world_size:
            rounded = -(-whole // world_size)
            typer.echo(
                f"{operator.split}={whole} does not divide by {world_size} ranks: each is taken to have {rounded}",
                err=True,
            )


def schedules_of(words: list[str]) -> str | dict[str, str]:
    """Return one schedule, or one for each tensor (`TENSOR:SCHEDULE`). Raises InputError."""
    if len(words) == 1 and ":" not in words[0]:
        return words[0]
    by_tensor = dict(word.partition(":")[::2] for word in words)
    if len(by_tensor) != len(words) or not all(by_tensor.values()):
        raise InputError(f"schedules {words}", "not one for each tensor", "Write TENSOR:SCHEDULE, each tensor once")
    return by_tensor


def integers_of(text: str) -> dict[str, int]:
    """Return `M=8192,N=3584` as name -> integer. Raises InputError."""
    integers: dict[str, int] = {}
    for word in text.split(",") if text.strip() else ():
        name, _, value = (part.strip() for part in word.partition("="))
        is_number = value.isascii() and value.isdecimal() and len(value) < 11
        if not (name.isidentifier() or SHAPE.fullmatch(name)) or name in integers or not is_number:
            request, reason = f"numbers {text[:60]!r}", f"{word[:40]!r} is none, or twice"
            raise InputError(request, reason, "Write NAME=NUMBER,NAME=NUMBER")
        integers[name] = int(value)
    return integers


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
