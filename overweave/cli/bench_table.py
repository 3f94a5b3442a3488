"""The tables of a comparison (one for each case, then one line per method over all cases), and the file of `--json`."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from overweave.cli.output_file import write_file
from overweave.ir.operators.registry import OPERATORS
from overweave.tuner.measure.baselines import OURS, SEQUENTIAL, TORCH_FUSED
from overweave.tuner.measure.bench import (
    BenchRun,
    CaseRows,
    GroupSummary,
    MethodRow,
    Spread,
    middle,
    regressions,
    spread,
    summarize,
    summarize_groups,
)

CASE_COLUMNS = (
    "median\nus", "p90\nus", "host\nus", "faster than\nlibrary", "faster than\ntorch fused",
    "exposed\nus", "overlap\nefficiency", "overlap\nratio", "of the\nceiling",
)  # fmt: skip
SUMMARY_COLUMNS = (
    "cases", "geomean\nus", "faster than\nlibrary", "at worst", "faster than\ntorch fused", "overlap\nefficiency",
)  # fmt: skip
LEAST_WIDTH = 152  # characters; a pipe or a narrow terminal must not cost digits


def print_runs(runs: tuple[BenchRun, ...], middle_run: int, spreads: dict[str, dict[str, Spread]]) -> None:
    """Print the middle run in full, and the summary with the spread over all runs."""
    console = Console()
    console.width = max(console.width, LEAST_WIDTH)
    run = runs[middle_run]
    versions = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    where = f"{run.world_size} x {run.devices[0]}, {run.dtype}, {run.date}"
    console.print(f"{run.operator}: {where}; {versions}", markup=False)
    for case in run.cases:
        console.print(_case_table(case, is_matmul=run.operator in OPERATORS))
        for name, reason in case.left_out.items():
            console.print(f"  left out: {name}: {reason}", markup=False)
    console.print(_summary_table(run, spreads, len(runs)))
    plans = next((line.plans for line in summarize(run) if line.name == OURS), {})
    if plans:
        console.print(f"overweave ran {', '.join(f'{plan} ({cases})' for plan, cases in plans.items())}", markup=False)
    for group in summarize_groups(run):
        console.print(_group_line(group), markup=False, soft_wrap=True)
    if run.device == "cpu":
        console.print("Emulated ranks: results agree, and times are no figures of any machine.", markup=False)
    slower = regressions(run, OURS)
    if slower:
        names = ", ".join(rows.case.name for rows in slower)
        console.print(f"Slower than the library in {len(slower)} cases: {names}", markup=False)


def _group_line(group: GroupSummary) -> str:
    ceiling = "" if group.ceiling is None else f", {group.ceiling:.3f} of the ceiling's"
    return (
        f"{group.group}, {group.cases} cases: the quickest of ours has {group.speedup:.3f} of the library's speed in "
        f"the geometric mean ({group.slowest:.3f} at worst){ceiling}"
    )


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")  # names of plans take further lines, so that numbers keep their digits
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _case_table(rows: CaseRows, is_matmul: bool) -> Table:
    case = rows.case
    mode = ", all methods as captured graphs" if rows.is_replayed else ""
    product = f": [{case.m}, {case.k}] @ [{case.k}, {case.n}]" if is_matmul else ""
    is_measured = any(row.measures is not None for row in rows.methods)
    columns = CASE_COLUMNS if is_measured else CASE_COLUMNS[:-4]
    table = _table(f"{case.name}{product}{mode}", columns)
    for row in rows.methods:
        table.add_row(*_case_cells(row)[: 1 + len(columns)])
    return table


def _case_cells(row: MethodRow) -> list[str]:
    label = row.label if row.label.endswith(row.plan) else f"{row.label}: {row.plan}"
    cells = [label, f"{row.median_us:.1f}", f"{row.p90_us:.1f}", _number(row.host_us, ".1f")]
    for baseline in (SEQUENTIAL, TORCH_FUSED):
        ratio = row.speedups.get(baseline)
        cells.append(f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})" if ratio else "")
    measures = row.measures
    if measures is None:
        return [*cells, "", "", "", ""]
    rest = (measures.overlap_efficiency, measures.overlap_ratio, measures.ceiling_fraction)
    return [*cells, f"{measures.exposed_us:.1f}", *(_number(value, ".2f") for value in rest)]


def _summary_table(run: BenchRun, spreads: dict[str, dict[str, Spread]], runs: int) -> Table:
    """Return the table with one line per method over all cases. spreads: method -> number -> spread over runs."""
    title = "all cases" if runs == 1 else f"all cases, the middle of {runs} whole runs (least - largest)"
    table = _table(title, SUMMARY_COLUMNS)
    for line in summarize(run):
        numbers = spreads[line.name]
        keys = ("time_us", f"speedup.{SEQUENTIAL}", "slowest", f"speedup.{TORCH_FUSED}", "efficiency")
        table.add_row(line.label, str(line.cases), *(_spread(numbers.get(key), runs) for key in keys))
    return table


def _spread(numbers: Spread | None, runs: int) -> str:
    if numbers is None:
        return ""
    middle = _significant(numbers.middle)
    return middle if runs == 1 else f"{middle} ({_significant(numbers.least)}-{_significant(numbers.largest)})"


def _significant(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


class BenchReport(Struct, frozen=True, kw_only=True):
    """The content of the file. runs: every whole run. middle: the one to quote. spread: of its numbers over runs.

    unfinished: "" or the progress of a bench that still runs or was stopped. Then the last run may lack cases; it
    counts for the middle and the spread only if it is the first.
    """

    command: str
    shapes_source: str
    unfinished: str = ""
    runs: tuple[BenchRun, ...]
    middle: int
    spread: dict[str, dict[str, Spread]]


def report_of(command: str, cases_of: tuple[str, int], repeats: int, runs: tuple[BenchRun, ...]) -> BenchReport:
    """Return the file after some of `repeats` whole runs, the last of which may lack cases.

    cases_of: the source of the cases, and how many there are.
    """
    source, cases = cases_of
    whole = tuple(each for each in runs if len(each.cases) == cases) or runs
    middle_run, done = middle(whole, OURS), len(runs[-1].cases)
    is_finished = len(runs) == repeats and done == cases
    return BenchReport(
        command=command,
        shapes_source=source,
        unfinished="" if is_finished else f"{done} of {cases} cases of run {len(runs)} of {repeats}",
        runs=runs,
        middle=middle_run,
        spread=spread(whole, middle_run),
    )


def read_report(path: Path) -> BenchReport:
    """Return the content of a bench's file."""
    return msgspec.json.decode(path.read_bytes(), type=BenchReport)


def write_report(path: Path, report: BenchReport) -> None:
    """Write the file atomically. Raises InputError."""
    write_file(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
