"""Summaries of whole runs: one line per method, and the middle one of several runs."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from overweave.tuner.measure.baselines import SEQUENTIAL, TORCH_FUSED
from overweave.tuner.measure.bench import BenchRun, CaseRows, MethodRow
from overweave.tuner.measure.timer import geometric_mean, median


class MethodSummary(Struct, frozen=True, kw_only=True):
    """A method over all cases in which it took part; None if the baseline took part in none of them.

    speedups: geometric mean, by baseline. slowest: the least speedup over the sequential method. efficiency: mean
    overlap efficiency. plans: plan -> number of cases in which ours ran it.
    """

    name: str
    label: str
    cases: int
    time_us: float
    speedups: dict[str, float]
    slowest: float | None
    efficiency: float | None
    plans: dict[str, int] = {}


class Spread(Struct, frozen=True):
    """A number over whole runs: the least, the middle run's, the largest."""

    least: float
    middle: float
    largest: float


def summarize(run: BenchRun) -> tuple[MethodSummary, ...]:
    """Return one line per method, in the order of the rows."""
    by_name: dict[str, list[MethodRow]] = {}
    for case in run.cases:
        for row in case.methods:
            by_name.setdefault(row.name, []).append(row)
    return tuple(_summary(rows) for rows in by_name.values())


def middle(runs: tuple[BenchRun, ...], method: str) -> int:
    """Return the index of the middle run, by the geometric mean of a method's times; if it took no part, of all
    methods."""
    times = [_time_us(run, method) for run in runs]
    ordered = sorted(range(len(runs)), key=lambda index: times[index])
    return ordered[(len(ordered) - 1) // 2]


def spread(runs: tuple[BenchRun, ...], middle_run: int) -> dict[str, dict[str, Spread]]:
    """Return for each method and each of its summary numbers its least, middle and largest value over whole runs."""
    summaries = [{line.name: _numbers(line) for line in summarize(run)} for run in runs]
    table: dict[str, dict[str, Spread]] = {}
    for name, numbers in summaries[middle_run].items():
        for key, value in numbers.items():
            values = [other[name][key] for other in summaries if key in other.get(name, {})]
            table.setdefault(name, {})[key] = Spread(min(values), value, max(values))
    return table


def regressions(run: BenchRun, method: str) -> tuple[CaseRows, ...]:
    """Return the cases in which a method is slower than the sequential one."""
    return tuple(
        case
        for case in run.cases
        for row in case.methods
        if row.name == method and SEQUENTIAL in row.speedups and row.speedups[SEQUENTIAL].value < 1
    )


def _summary(rows: list[MethodRow]) -> MethodSummary:
    """Return the summary of a method's rows."""
    ratios = {
        baseline: [row.speedups[baseline].value for row in rows if baseline in row.speedups]
        for baseline in (SEQUENTIAL, TORCH_FUSED)
    }
    efficiencies = [
        row.measures.overlap_efficiency
        for row in rows
        if row.measures is not None and row.measures.overlap_efficiency is not None
    ]
    return MethodSummary(
        name=rows[0].name,
        label=rows[0].label,
        cases=len(rows),
        time_us=geometric_mean([row.median_us for row in rows]),
        speedups={baseline: geometric_mean(values) for baseline, values in ratios.items() if values},
        slowest=min(ratios[SEQUENTIAL], default=None),
        efficiency=sum(efficiencies) / len(efficiencies) if efficiencies else None,
        plans=dict(Counter(row.plan for row in rows if row.plan).most_common()),
    )


def _time_us(run: BenchRun, method: str) -> float:
    lines = {line.name: line.time_us for line in summarize(run)}
    return lines.get(method, median(list(lines.values())))


def _numbers(line: MethodSummary) -> dict[str, float]:
    numbers = {"time_us": line.time_us, **{f"speedup.{name}": value for name, value in line.speedups.items()}}
    optional = {"slowest": line.slowest, "efficiency": line.efficiency}
    return numbers | {key: value for key, value in optional.items() if value is not None}
