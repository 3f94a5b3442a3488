"""Result files of `overweave bench` as rows: how long a method took, beyond the matmul alone, and how sure that is."""

from __future__ import annotations

from math import hypot, sqrt
from pathlib import Path

import msgspec
from msgspec import Struct

from overweave.errors import InputError
from overweave.hardware.machine import Machine
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.schedules.methods.registry import METHODS
from overweave.tuner.measure.baselines import NAMED, OURS
from overweave.tuner.space.shapes import DtypeWord, ShapeCase
from overweave.tuner.space.space import Options, candidate, full_options
from overweave.tuner.space.target import Target, target_on

MATMUL = "matmul"
COMPARED = ("sequential", "per_shard", OURS)
# What ran where a file does not say, of mlp cases: the choice, and what plans with a tile kernel had in common.
CHOSEN = {"all_gather_matmul": "push", "matmul_reduce_scatter": "scatter own_pieces=4"}
COMMON: Options = {"kernel": "hopper", "pieces": 1, "split_n": 1, "block_m": 128, "block_n": 256}
# Of normally distributed samples: the 90th percentile stands so many deviations above the median, a median's own
# error is so many times a mean's, and 95 % lie within so many deviations.
P90_DEVIATIONS, MEDIAN_OVER_MEAN, SURE = 1.2816, 1.2533, 1.96


class MethodTime(Struct):
    """What is read of a method's row (tuner/measure/bench.py). plan: what the method ran, as `plan=` takes it."""

    name: str
    median_us: float
    p90_us: float
    plan: str = ""


class CaseTimes(Struct):
    case: ShapeCase
    methods: tuple[MethodTime, ...]

    def of(self, name: str) -> MethodTime | None:
        return next((method for method in self.methods if method.name == name), None)


class Effort(Struct):
    rounds: int


class RunTimes(Struct):
    operator: str
    world_size: int
    device: str
    dtype: DtypeWord
    effort: Effort
    cases: tuple[CaseTimes, ...]

    def problem(self, case: ShapeCase) -> Problem:
        """One rank's part of a global matmul, as the comparison splits it."""
        return case.problem(self.operator, self.world_size, self.dtype)


class Report(Struct):
    """A result file: several whole runs, of which the middle one is quoted. unfinished: how far, of one that is not."""

    runs: tuple[RunTimes, ...]
    middle: int
    unfinished: str = ""


class Measured(Struct, frozen=True, kw_only=True):
    """A method on a case, in microseconds. schedule, options: what it ran. exposed: beyond the matmul alone.

    run: operator and ranks, and whether its file is unfinished.

    noise: 95 % of repeats find an exposed time within so much of this one, by the scatter of its samples or, where that
    is more, by the whole runs of its file, which lie so far apart.
    """

    run: str
    case: str
    method: str
    problem: Problem
    schedule: str
    options: Options
    us: float
    matmul_us: float
    noise_us: float

    @property
    def exposed_us(self) -> float:
        return self.us - self.matmul_us


def read(path: Path, machine: Machine) -> list[Measured]:
    """The rows of the middle run of a result file; none of blocks and layers of experts, which are no operator, of an
    operator of torch's, or of a plan that is no more.

    Raises InputError for a file that is none.
    """
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
        middle = report.runs[report.middle]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise InputError(f"results {path}", str(error), "Give files that `overweave bench --json` wrote") from error
    if middle.device != "cuda":
        raise InputError(f"results {path}", f"measured on {middle.device}", f"Give files measured on {machine.title}")
    rows = []
    for times in middle.cases if middle.operator in OPERATORS else ():
        for method in times.methods:
            if method.name in COMPARED or method.name.startswith(NAMED):
                rows += _row(report, times, method, target_on(machine))
    return rows


def _row(report: Report, times: CaseTimes, method: MethodTime, target: Target) -> list[Measured]:
    run = report.runs[report.middle]
    problem, alone = run.problem(times.case), times.of(MATMUL)
    told = method.plan or (CHOSEN[problem.operator] if method.name == OURS else method.name.removeprefix(NAMED))
    name, *pairs = told.split()
    schedule = f"{problem.operator}.{name}"
    if alone is None or schedule not in METHODS:
        return []
    asked = {option: int(value) if value.isdigit() else value for option, value in (pair.split("=") for pair in pairs)}
    if method.plan:
        options = full_options(problem, target, candidate(name, asked))
    else:
        options = (COMMON if METHODS[schedule].is_fused else {}) | asked
    return [
        Measured(
            run=f"{run.operator} W={run.world_size}{' unfinished' if report.unfinished else ''}",
            case=times.case.name,
            method=method.name.removeprefix(NAMED),
            problem=problem,
            schedule=schedule,
            options=options,
            us=method.median_us,
            matmul_us=alone.median_us,
            noise_us=max(_scatter_us(run, method, alone), _spread_us(report, times.case, method.name)),
        )
    ]


def _scatter_us(run: RunTimes, method: MethodTime, alone: MethodTime) -> float:
    """Half the 95 % interval of a difference of medians."""
    deviation = hypot(method.p90_us - method.median_us, alone.p90_us - alone.median_us) / P90_DEVIATIONS
    return SURE * MEDIAN_OVER_MEAN * deviation / sqrt(run.effort.rounds)


def _spread_us(report: Report, case: ShapeCase, name: str) -> float:
    """Half the range of what whole runs found exposed; zero of a single run."""
    found = []
    for times in (times for run in report.runs for times in run.cases if times.case == case):
        method, alone = times.of(name), times.of(MATMUL)
        if method is not None and alone is not None:
            found.append(method.median_us - alone.median_us)
    return (max(found) - min(found)) / 2
