"""Does the simulator predict what was measured? Result files of `overweave bench` beside simulated calls.

    python -m campaigns.sim_accuracy [FILE ...] [--machine h200x4]        (default: benchmarks/results/mlp.*.json)
    python -m campaigns.sim_accuracy --all                          (every result file)
    python -m campaigns.sim_accuracy --calibrated FILE ...          (on the GPU at hand, by its calibrated file)

Judged are NCCL + cuBLAS (`sequential`), one library matmul per shard (`per_shard`) and ours, as its plan was then.
Exposed communication is what a call takes beyond the matmul alone, on both sides (Flux, 5.1); its error is the mean
over rows of |predicted / measured - 1|. It is told twice: over all rows, and over those whose measured value exceeds
its own noise, since a row that measured 0 +- 2 us has no relative error to speak of. And once more in microseconds,
all together.

No number of the machine file may be fitted on these rows: each names its source. The `small` files are what some were
fitted on; their rows can be shown, and are no test. Launches are the host's affair and not simulated, so cases of fewer
than 1,024 rows are shown but not judged.

--calibrated judges one number, the mean error of whole calls on a machine that `overweave calibrate -w 2` has measured,
of files that were benched there: `overweave bench all_gather_matmul --shapes mlp -w 2 --json FILE`, and so on.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import hypot, sqrt
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from msgspec import Struct
from msgspec.structs import replace

from campaigns.verdict import Verdict, tell
from overweave.errors import InputError, OverweaveError
from overweave.hardware.cards import MOST_OF_ONE_HOST, machine_for
from overweave.hardware.machine import Machine, load
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.memory.cuda.card import current_gpu
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS
from overweave.sim.cost import library_matmul_us
from overweave.sim.simulate import total_us
from overweave.tuner.measure.baselines import NAMED, OURS
from overweave.tuner.space.shapes import DtypeWord, ShapeCase
from overweave.tuner.space.space import Options, candidate, full_options
from overweave.tuner.space.target import Target, machine_of, target_on

# Result files of `overweave bench` as rows: how long a method took, beyond the matmul alone, and how sure that is.

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


# The simulator against every measured row of the dense operators: whole calls, and which plan is the quickest.
# Left out, and counted: rows that a constant of the machine file was fitted on, rows of few rows, whose launches are
# the host's affair, and plans that are gone. Beside the judged numbers stand those of a machine without contention.

FEWEST_ROWS, FEWEST_PLANS, FIRST = 1024, 4, 3
MEAN, NEARLY_ALL, AMONG_FIRST = 0.05, 0.12, 0.95
ALIKE = 1.005  # times that one run does not tell apart
MLP, MLP_MEAN = "mlp.", 0.05
# The machine file's sources name these, or sim/cost.py does.
FITTED = ("small.", "small_plans.")
FITTED_ROWS = {"plans.matmul_reduce_scatter.h200x4.2026-11-20.json": "sums=epilogue"}
# Kernels that were tried and are gone, as benchmarks/results/README.md tells: tiles that leave for a peer as whole
# rectangles, or in strips with other rests or none.
GONE = (
    *("stored_rectangles.", "stored_unrested.", "stored_waiting.", "rested.", "unrested.", "rests."),
    *("stored.matmul_all_reduce.h200x4.", "stored.matmul_reduce_scatter.h200x4."),
)


class Error(NamedTuple):
    """A measured row: its file and what was predicted, with contention and without."""

    file: str
    measured: Measured
    predicted_us: float
    alone_us: float

    @property
    def share(self) -> float:
        return abs(self.predicted_us / self.measured.us - 1)

    @property
    def alone_share(self) -> float:
        return abs(self.alone_us / self.measured.us - 1)


def every_verdict(files: Iterable[Path], machine: Machine) -> list[Verdict]:
    """What holds over all rows of some result files; files that are none are left out, and counted."""
    kept, left = rows(files, machine)
    counted = ", ".join(f"{count} {why}" for why, count in sorted(left.items()))
    if not kept:
        return [Verdict("rows to judge", f"none; left out: {counted}", False)]
    return [Verdict("rows", f"{len(kept)} judged; left out: {counted or 'none'}", None), *judged(kept)]


def rows(files: Iterable[Path], machine: Machine) -> tuple[list[Error], Counter[str]]:
    """Those that are judged, and how many are not, by the reason."""
    kept, left, alone = list[Error](), Counter[str](), without_contention(machine)
    for path in files:
        try:
            found = read(path, machine)
        except InputError:
            left["files without results"] += 1
            continue
        for measured in found:
            why = _left_out(path.name, measured)
            if why:
                left[why] += 1
                continue
            try:
                plan = build(measured.schedule, measured.problem, measured.options)
            except OverweaveError:
                left["plans that are gone"] += 1
                continue
            kept.append(Error(path.name, measured, total_us(plan, machine), total_us(plan, alone)))
    return kept, left


def without_contention(machine: Machine) -> Machine:
    """Copies slow no kernel and each other not, and a collective holds one SM."""
    sharing = replace(
        machine.sharing,
        copy_engine=replace(machine.sharing.copy_engine, factor=1.0),
        collective=replace(machine.sharing.collective, sms=1),
    )
    wide = tuple((size, rate * (machine.gpus - 1)) for size, rate in machine.links.push.points)
    crowd = replace(machine.links.all_peers, points=wide)
    port = replace(machine.topology.port, gb_per_s=machine.topology.port.gb_per_s * machine.gpus)
    links = tuple(
        replace(
            link,
            curve=replace(link.curve, points=tuple((size, rate * machine.gpus) for size, rate in link.curve.points)),
        )
        for link in machine.topology.links
    )
    topology = replace(machine.topology, port=port, links=links)
    return replace(machine, sharing=sharing, links=replace(machine.links, all_peers=crowd), topology=topology)


def judged(kept: Sequence[Error]) -> list[Verdict]:
    """The claims over judged rows."""
    shares, alone = sorted(each.share for each in kept), [each.alone_share for each in kept]
    mean, nearly_all = sum(shares) / len(shares), shares[int(0.95 * (len(shares) - 1))]
    far = Counter(each.measured.schedule for each in kept if each.share > NEARLY_ALL)
    names = ", ".join(f"{name} {count}" for name, count in far.most_common(3))
    known = [each.share for each in kept if each.file.startswith(MLP)]
    of_mlp = sum(known) / len(known) if known else 0.0
    return [
        Verdict(f"mean error at most {MEAN:.0%}", f"{mean:.1%} of {len(shares)}", mean <= MEAN),
        Verdict(
            f"95th percentile at most {NEARLY_ALL:.0%}",
            f"{nearly_all:.1%}; beyond it {sum(far.values())} rows: {names or 'none'}",
            nearly_all <= NEARLY_ALL,
        ),
        Verdict(
            f"mean error on the mlp rows at most {MLP_MEAN:.0%}", f"{of_mlp:.1%} of {len(known)}", of_mlp <= MLP_MEAN
        ),
        _first(kept),
        Verdict("mean error without contention", f"{sum(alone) / len(alone):.1%}", None),
    ]


def _first(kept: Sequence[Error]) -> Verdict:
    """Of problems with several measured plans, how often the quickest is among the first that are predicted.

    Plans that a run cannot tell apart from the quickest count as it.
    """
    problems: dict[tuple[str, str, str], list[Error]] = defaultdict(list)
    for each in kept:
        problems[each.file, each.measured.run, each.measured.case].append(each)
    several = [those for those in problems.values() if len(those) >= FEWEST_PLANS]
    found = 0
    for those in several:
        quickest_us = min(each.measured.us for each in those)
        first = sorted(those, key=lambda each: each.predicted_us)[:FIRST]
        found += any(each.measured.us <= quickest_us * ALIKE for each in first)
    claim = f"the quickest among the first {FIRST} on {AMONG_FIRST:.0%}"
    share = found / len(several) if several else 1.0
    return Verdict(
        claim, f"{share:.1%} of {len(several)} problems with {FEWEST_PLANS} plans or more", share >= AMONG_FIRST
    )


def _left_out(file: str, measured: Measured) -> str:
    """Why a row is not judged; empty where it is."""
    if file.startswith(GONE):
        return "rows of kernels that are gone"
    word = FITTED_ROWS.get(file)
    if file.startswith(FITTED) or (word and word in measured.method):
        return "rows that a constant was fitted on"
    return f"rows of problems of fewer than {FEWEST_ROWS} rows" if measured.problem.m < FEWEST_ROWS else ""


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CALIBRATED_WITHIN = 0.06
TOTAL_WITHIN, EXPOSED_WITHIN, SAME_WITHIN = 0.08, 0.35, 0.05
LEAST_EXPOSED_US = 1.0  # what the timer tells apart: no error is counted relative to less


class Row(Struct, frozen=True, kw_only=True):
    """One method on one case, simulated and measured, in microseconds. where: operator, world size and case.

    noise_us: of what was measured as exposed.
    """

    where: tuple[str, str]
    method: str
    is_judged: bool
    predicted_us: float
    measured_us: float
    predicted_matmul_us: float
    measured_matmul_us: float
    noise_us: float

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

    @property
    def is_distinct(self) -> bool:
        """Whether what was measured as exposed exceeds its noise."""
        return abs(self.exposed_us[1]) > self.noise_us

    def __str__(self) -> str:
        run, case = self.where
        return f"{run} {case}"


def verdicts(rows: list[Row]) -> list[Verdict]:
    """The claims over the judged rows; none of them holds of no rows."""
    judged = [row for row in rows if row.is_judged]
    if not judged:
        return [Verdict("rows to judge", "none", False)]
    distinct = [row for row in judged if row.is_distinct]
    return [
        _total(judged),
        _exposed(judged, "over all rows"),
        _exposed(distinct, "where more was measured than its noise"),
        _in_sum(judged),
        _order(judged),
    ]


def _total(rows: list[Row]) -> Verdict:
    worst = max(rows, key=lambda row: abs(row.error))
    within = sum(abs(row.error) <= TOTAL_WITHIN for row in rows)
    found = f"{within} of {len(rows)} rows; worst {worst.error:+.1%}, {worst.method} of {worst}"
    return Verdict(f"total time within {TOTAL_WITHIN:.0%}", found, within == len(rows))


def _exposed(rows: list[Row], which: str) -> Verdict:
    claim = f"exposed communication within {EXPOSED_WITHIN:.0%} in the mean, {which}"
    if not rows:
        return Verdict(claim, "no such row", False)
    errors = [abs(row.exposed_error) for row in rows]
    mean, worst = sum(errors) / len(rows), rows[errors.index(max(errors))]
    predicted, measured = worst.exposed_us
    found = f"mean error {mean:.1%} of {len(rows)} rows; worst {worst.method} of {worst}"
    return Verdict(
        claim, f"{found}: {predicted:.1f} for {measured:.1f} +- {worst.noise_us:.1f} us", mean <= EXPOSED_WITHIN
    )


def _in_sum(rows: list[Row]) -> Verdict:
    missed_us = sum(abs(row.exposed_us[0] - row.exposed_us[1]) for row in rows)
    exposed_us = sum(row.exposed_us[1] for row in rows)
    share = missed_us / max(exposed_us, LEAST_EXPOSED_US)
    found = f"missed by {missed_us:.0f} of {exposed_us:.0f} us, {share:.1%}"
    return Verdict(
        f"exposed communication within {EXPOSED_WITHIN:.0%}, all rows together", found, share <= EXPOSED_WITHIN
    )


def _order(rows: list[Row]) -> Verdict:
    pairs = distinct_pairs(rows)
    wrong = [pair for pair in pairs if not _in_order(*pair)]
    swapped = "".join(f"; {one.method} and {other.method} of {one}" for one, other in wrong)
    found = f"{len(wrong)} of {len(pairs)} pairs wrong{swapped}"
    return Verdict(f"order of methods that differ by more than {SAME_WITHIN:.0%}", found, not wrong)


def distinct_pairs(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Methods of one case whose measured times differ by more than 5 % of the shorter one."""
    return [
        (one, other)
        for one, other in combinations(rows, 2)
        if one.where == other.where
        and abs(one.measured_us - other.measured_us) > SAME_WITHIN * min(one.measured_us, other.measured_us)
    ]


def _in_order(one: Row, other: Row) -> bool:
    return (one.predicted_us < other.predicted_us) == (one.measured_us < other.measured_us)


def simulated(measured: Measured, machine: Machine) -> Row:
    """A measured row beside its prediction."""
    problem = measured.problem
    return Row(
        where=(measured.run, measured.case),
        method=measured.method,
        is_judged=problem.m >= FEWEST_ROWS,
        predicted_us=total_us(build(measured.schedule, problem, measured.options), machine),
        measured_us=measured.us,
        predicted_matmul_us=library_matmul_us(machine, (problem.m, problem.n, problem.k), problem.dtype),
        measured_matmul_us=measured.matmul_us,
        noise_us=measured.noise_us,
    )


def _print(rows: list[Row]) -> None:
    columns = f"{'predicted':>10s} {'measured':>9s} {'error':>7s}"
    print(f"{'us':44s} {'total: ' + columns}   {'exposed: ' + columns} {'noise':>7s}")
    for row in rows:
        predicted, measured = row.exposed_us
        total = f"{row.predicted_us:17.1f} {row.measured_us:9.1f} {row.error:+7.1%}"
        exposed = f"{predicted:19.1f} {measured:9.1f} {row.exposed_error:+7.0%} {row.noise_us:7.1f}"
        remark = "" if row.is_distinct else "   no more than noise"
        if not row.is_judged:
            remark = "   too few rows: not judged"
        print(f"{f'{row} {row.method}':44s} {total}   {exposed}{remark}")


def calibrated_verdict(rows: Sequence[Row]) -> Verdict:
    """What a calibrated file promises."""
    errors = [abs(row.error) for row in rows if row.is_judged]
    mean = sum(errors) / len(errors) if errors else 1.0
    promise = f"mean error at most {CALIBRATED_WITHIN:.0%} by the calibrated file"
    return Verdict(promise, f"{mean:.1%} of {len(errors)}", bool(errors) and mean <= CALIBRATED_WITHIN)


def _calibrated() -> Machine:
    """The machine at hand, as it was calibrated. Raises InputError where it was not."""
    found = machine_of(current_gpu()) if torch.cuda.is_available() else None
    machine = machine_for(found, MOST_OF_ONE_HOST) if found and found.basis == "calibrated" else None
    if machine is None:
        here = "no GPU is at hand" if found is None else str(found)
        raise InputError("predictions by a calibrated file", here, "Run `overweave calibrate -w 2` here first")
    return machine


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--machine", default="h200x4")
    parser.add_argument("--all", action="store_true", help="judge every result file, by other bars")
    parser.add_argument("--calibrated", action="store_true", help="judge the mean error by this machine's own file")
    asked = parser.parse_args(arguments)
    if asked.all:
        return tell(every_verdict(sorted(RESULTS.glob("*.json")), load(asked.machine)))
    files = asked.files or sorted(RESULTS.glob("mlp.*.json"))
    try:
        machine = _calibrated() if asked.calibrated else load(asked.machine)
        rows = [simulated(measured, machine) for path in files for measured in read(path, machine)]
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    _print(rows)
    if asked.calibrated:
        return tell([calibrated_verdict(rows)])
    found = verdicts(rows)
    for verdict in found:
        print(f"{'pass' if verdict.holds else 'FAIL'}  {verdict.promise}: {verdict.found}")
    return int(not all(verdict.holds for verdict in found))


if __name__ == "__main__":
    sys.exit(main())
