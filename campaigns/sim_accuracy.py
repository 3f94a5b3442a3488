"""Does the simulator predict what was measured? Result files of `overweave bench` beside simulated calls.

    python -m campaigns.sim_accuracy [FILE ...] [--machine h200x4]        (default: benchmarks/results/*.json)

Judged are NCCL + cuBLAS (`sequential`), one library matmul per shard (`per_shard`) and ours as the chooser picks it.
Exposed communication is what a call takes beyond the matmul alone, on both sides (Flux, 5.1); its error is the mean
over rows of |predicted / measured - 1|. No number of the machine file may be fitted on these rows: each names its
source.

Launches are the host's affair and not simulated, so cases of fewer than 1,024 rows are shown but not judged.
"""

from __future__ import annotations

import argparse
import sys
from itertools import combinations
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from overweave.errors import InputError
from overweave.hardware.machine import Machine, load
from overweave.ir.plan import Dtype, Problem
from overweave.schedules.catalog import build
from overweave.sim.cost import library_matmul_us
from overweave.sim.simulate import total_us
from overweave.tuner.choose import Choice, Target, choose
from overweave.tuner.shapes import Case

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MATMUL, METHODS = "matmul", ("sequential", "per_shard", "overweave")
DTYPES: dict[str, Dtype] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
FEWEST_ROWS = 1024
TOTAL_WITHIN, EXPOSED_WITHIN, SAME_WITHIN = 0.08, 0.35, 0.05
LEAST_EXPOSED_US = 1.0  # what the timer tells apart: no error is counted relative to less


class MethodTime(Struct):
    """What is read of a method's row (tuner/bench.py)."""

    name: str
    median_us: float


class CaseTimes(Struct):
    case: Case
    methods: tuple[MethodTime, ...]


class RunTimes(Struct):
    operator: str
    world_size: int
    device: str
    dtype: Literal["bf16", "fp16", "fp32"]
    cases: tuple[CaseTimes, ...]


class ReportTimes(Struct):
    runs: tuple[RunTimes, ...]
    middle: int


class Row(Struct, frozen=True, kw_only=True):
    """One method on one case, simulated and measured, in microseconds. where: operator, world size and case."""

    where: tuple[str, int, str]
    method: str
    plan: str
    is_judged: bool
    predicted_us: float
    measured_us: float
    predicted_matmul_us: float
    measured_matmul_us: float

    @property
    def error(self) -> float:
        """Of the whole call's time, relative."""
        return self.predicted_us / self.measured_us - 1

    @property
    def exposed_us(self) -> tuple[float, float]:
        """Predicted and measured."""
        return self.predicted_us - self.predicted_matmul_us, self.measured_us - self.measured_matmul_us

    @property
    def exposed_error(self) -> float:
        predicted, measured = self.exposed_us
        return (predicted - measured) / max(abs(measured), LEAST_EXPOSED_US)


class Verdict(Struct, frozen=True):
    """One of the three claims, what was found, and whether it holds."""

    claim: str
    found: str
    holds: bool


def read_rows(path: Path, machine: Machine) -> list[Row]:
    """The rows of the middle run of a result file. Raises InputError for a file that is none."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=ReportTimes)
        run = report.runs[report.middle]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise InputError(f"results {path}", str(error), "Give files that `overweave bench --json` wrote") from error
    if run.device != "cuda":
        raise InputError(f"results {path}", f"measured on {run.device}", f"Give files measured on {machine.title}")
    return [row for times in run.cases for row in _rows_of(times, run, machine)]


def verdicts(rows: list[Row]) -> list[Verdict]:
    """The three claims over the judged rows; none of them holds of no rows."""
    judged = [row for row in rows if row.is_judged]
    if not judged:
        return [Verdict("rows to judge", "none", False)]
    worst = max(judged, key=lambda row: abs(row.error))
    exposed = sum(abs(row.exposed_error) for row in judged) / len(judged)
    # Where next to nothing is exposed a few microseconds are many times as much: hence this reading too.
    missed_us = sum(abs(row.exposed_us[0] - row.exposed_us[1]) for row in judged)
    pooled = missed_us / max(sum(row.exposed_us[1] for row in judged), 1e-9)
    pairs = distinct_pairs(judged)
    wrong = [pair for pair in pairs if not _in_order(*pair)]
    swapped = "".join(f"; {one.method} and {other.method} of {_named(one)}" for one, other in wrong)
    return [
        Verdict(
            f"total time within {TOTAL_WITHIN:.0%}",
            f"worst {worst.error:+.1%}, {worst.method} of {_named(worst)}",
            abs(worst.error) <= TOTAL_WITHIN,
        ),
        Verdict(
            f"exposed communication within {EXPOSED_WITHIN:.0%} in the mean",
            f"mean error {exposed:.1%} over {len(judged)} rows; all together {pooled:.1%} of what is exposed",
            exposed <= EXPOSED_WITHIN,
        ),
        Verdict(
            f"order of methods that differ by more than {SAME_WITHIN:.0%}",
            f"{len(wrong)} of {len(pairs)} pairs wrong{swapped}",
            not wrong,
        ),
    ]


def distinct_pairs(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Methods of one case whose measured times differ by more than 5 % of the shorter one."""
    return [
        (one, other)
        for one, other in combinations(rows, 2)
        if one.where == other.where and abs(one.measured_us - other.measured_us) > SAME_WITHIN * _shorter_us(one, other)
    ]


def _in_order(one: Row, other: Row) -> bool:
    return (one.predicted_us < other.predicted_us) == (one.measured_us < other.measured_us)


def _shorter_us(one: Row, other: Row) -> float:
    return min(one.measured_us, other.measured_us)


def _named(row: Row) -> str:
    operator, world_size, case = row.where
    return f"{operator} {case} W={world_size}"


def _rows_of(times: CaseTimes, run: RunTimes, machine: Machine) -> list[Row]:
    measured = {method.name: method.median_us for method in times.methods}
    problem = problem_of(run, times.case)
    matmul_us = library_matmul_us(machine, (problem.m, problem.n, problem.k), problem.dtype)
    rows = []
    for method in METHODS:
        if method in measured and MATMUL in measured:
            choice = _choice(problem, method, machine)
            rows.append(
                Row(
                    where=(run.operator, run.world_size, times.case.name),
                    method=method,
                    plan=choice.plan,
                    is_judged=problem.m >= FEWEST_ROWS,
                    predicted_us=total_us(build(choice.plan, problem, choice.options), machine),
                    measured_us=measured[method],
                    predicted_matmul_us=matmul_us,
                    measured_matmul_us=measured[MATMUL],
                )
            )
    return rows


def problem_of(run: RunTimes, case: Case) -> Problem:
    """One rank's part of a global matmul, as the comparison splits it: `n` of a gather, `k` of a scatter."""
    n, k, world_size = case.n, case.k, run.world_size
    if run.operator == "all_gather_matmul":
        n = -(-n // world_size)
    else:
        k = -(-k // world_size)
    return Problem(operator=run.operator, m=case.m, n=n, k=k, world_size=world_size, dtype=DTYPES[run.dtype])


def _choice(problem: Problem, method: str, machine: Machine) -> Choice:
    if method == "overweave":
        return choose(problem, Target("cuda", sms=machine.processor.sms))
    return Choice(f"{problem.operator}.{method}", {}, "a row of the comparison")


def _print(rows: list[Row]) -> None:
    columns = f"{'predicted':>10s} {'measured':>9s} {'error':>7s}"
    print(f"{'us':44s} {'total: ' + columns}   {'exposed: ' + columns}")
    for row in rows:
        predicted, measured = row.exposed_us
        name = f"{_named(row)} {row.method}"
        total = f"{row.predicted_us:17.1f} {row.measured_us:9.1f} {row.error:+7.1%}"
        exposed = f"{predicted:19.1f} {measured:9.1f} {row.exposed_error:+7.0%}"
        print(f"{name:44s} {total}   {exposed}{'' if row.is_judged else '   too few rows: not judged'}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--machine", default="h200x4")
    asked = parser.parse_args(arguments)
    files = asked.files or sorted(RESULTS.glob("*.json"))
    try:
        machine = load(asked.machine)
        rows = [row for path in files for row in read_rows(path, machine)]
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    _print(rows)
    found = verdicts(rows)
    for verdict in found:
        print(f"{'pass' if verdict.holds else 'FAIL'}  {verdict.claim}: {verdict.found}")
    return int(not all(verdict.holds for verdict in found))


if __name__ == "__main__":
    sys.exit(main())
