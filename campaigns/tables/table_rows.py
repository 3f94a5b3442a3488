"""The tables of compiled kernels as data: what a row says, how rows are kept, printed and judged. No GPU, no torch."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from campaigns.verdict import Verdict
from overweave.tuner.measure.timer import geometric_mean, median

MATMUL, LIBRARY, TORCH, PORTABLE, COMPILED = "matmul alone", "NCCL + cuBLAS", "torch fused", "portable", "compiled"
CHOSEN, BEST = "the tuner's choice", "best of the tables"
WITHIN, OVER_TORCH, CHOICE_WITHIN, COMPILE_US = 1.03, 1.03, 1.02, 1e6


class Row(NamedTuple):
    """One measurement: a point of a line of a table.

    table: a key of TABLES. shape: the matmul of one rank, MxNxK. series: the line. x: where on it; empty: it holds for
    all of them. how: the schedule or plan, and the tile. us, p90_us: of the slowest rank. rate: TFLOP/s of one rank; of
    a transfer, GB/s.
    """

    table: str
    operator: str
    shape: str
    series: str
    x: str
    how: str
    us: float
    p90_us: float
    rate: float


class Table(NamedTuple):
    """How a table is told. axis: what `x` is. cell: what of a row is printed, and how exactly. is_spread: not one by
    one."""

    title: str
    axis: str
    unit: str
    cell: Callable[[Row], float]
    digits: int = 0
    is_spread: bool = False


def _rate(row: Row) -> float:
    return row.rate


TABLES: dict[str, Table] = {
    "against": Table("Compiled against by hand and against torch", "case", "us", lambda row: row.us, 1),
    "backends": Table("Back end, chunks of a shard and SMs that communicate", "pieces", "TFLOP/s", _rate),
    "tiles": Table("Tile shape, stages and order", "blocks of rows that run together", "TFLOP/s", _rate),
    "streamed": Table("One kernel that streams chunks against a matmul per chunk", "chunks", "TFLOP/s", _rate),
    "tuner": Table("What the tuner chose", "", "us", lambda row: row.us, 1),
    "bandwidth": Table("Bandwidth of a back end by what it sends to each peer, and SMs", "KiB", "GB/s", _rate),
    "compile": Table("What a compilation takes without Triton", "", "ms", lambda row: row.us / 1e3, is_spread=True),
}


def write(path: Path, rows: Iterable[Row]) -> None:
    """All rows, with a head."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(Row._fields)
        table.writerows((*row[:6], *(f"{number:.2f}" for number in row[6:])) for row in rows)


def read(path: Path) -> list[Row]:
    """The rows of a file; none of one with another head."""
    with path.open(newline="") as file:
        lines = csv.reader(file)
        if next(lines, None) != list(Row._fields):
            return []
        return [Row._make([*line[:6], *map(float, line[6:])]) for line in lines]


def merged(known: Sequence[Row], found: Sequence[Row]) -> list[Row]:
    """What was known, but for the tables that were measured anew for an operator."""
    anew = {(row.table, row.operator) for row in found}
    rows = [*(row for row in known if (row.table, row.operator) not in anew), *found]
    return sorted(rows, key=lambda row: list(TABLES).index(row.table))


def grids(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Rows by table, operator and, where that is the same for all of a table, shape."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        shape = "" if row.table in ("against", "compile") else row.shape
        found.setdefault((row.table, row.operator, shape), []).append(row)
    return found


def grid(rows: Sequence[Row]) -> list[list[str]]:
    """One table as text, its head first: a line per series, a column per x; or how many spread."""
    table = TABLES[rows[0].table]
    if table.is_spread:
        return spread(rows)
    columns = list(dict.fromkeys(row.x for row in rows))
    cells = {(row.series, row.x): f"{table.cell(row):.{table.digits}f}" for row in rows}
    body = [
        [series, *(cells.get((series, x), "") for x in columns)] for series in dict.fromkeys(row.series for row in rows)
    ]
    return [[table.unit, *columns], *body]


def spread(rows: Sequence[Row]) -> list[list[str]]:
    """A line per series: of how many rows, their median, and the longest."""
    table = TABLES[rows[0].table]
    by_series: dict[str, list[float]] = {}
    for row in rows:
        by_series.setdefault(row.series, []).append(table.cell(row))
    body = [
        [series, str(len(cells)), *(f"{cell:.{table.digits}f}" for cell in (median(cells), max(cells)))]
        for series, cells in by_series.items()
    ]
    return [[table.unit, "exchanges", "median", "longest"], *body]


def show(rows: Sequence[Row]) -> str:
    """All tables as text."""
    told: list[str] = []
    for (name, operator, shape), own in grids(rows).items():
        lines = grid(own)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        told.append(f"{TABLES[name].title}: {operator} {shape}".rstrip())
        for first, *others in lines:
            cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
            told.append("  ".join(["", first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(told)


def ratios(rows: Iterable[Row], above: str, below: str) -> dict[str, float]:
    """By x, one series' time over another's, where both were measured."""
    times = {(row.series, row.x): row.us for row in rows}
    return {x: us / times[below, x] for (series, x), us in times.items() if series == above and (below, x) in times}


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """What the tables promise, as far as they were measured."""
    found: list[Verdict] = []
    for (name, operator, _), own in grids(rows).items():
        if name == "against":
            found += [_by_hand(operator, own), _over_torch(operator, own)]
        elif name == "tuner":
            found += _choice(operator, own)
        elif name == "compile":
            found.append(_compile_time(own))
    return found


def _by_hand(operator: str, rows: list[Row]) -> Verdict:
    promise = f"{operator}: compiled within {WITHIN:g} of portable, geometric mean"
    return _mean_holds(promise, ratios(rows, COMPILED, PORTABLE), max, lambda mean: mean <= WITHIN)


def _over_torch(operator: str, rows: list[Row]) -> Verdict:
    promise = f"{operator}: compiled at least {OVER_TORCH:g} times torch's fused, geometric mean"
    return _mean_holds(promise, ratios(rows, TORCH, COMPILED), min, lambda mean: mean >= OVER_TORCH)


def _mean_holds(
    promise: str, found: dict[str, float], worst_of: Callable[..., str], holds: Callable[[float], bool]
) -> Verdict:
    """worst_of: max or min, which of the ratios is the worst."""
    if not found:
        return Verdict(promise, "no case has both", False)
    mean, worst = geometric_mean(list(found.values())), worst_of(found, key=found.__getitem__)
    return Verdict(promise, f"{mean:.3f}, worst {worst} {found[worst]:.3f}, {len(found)} cases", holds(mean))


def _choice(operator: str, rows: list[Row]) -> list[Verdict]:
    times = {row.series: row for row in rows}
    promise = f"{operator}: the tuner's choice within {CHOICE_WITHIN:g} of the best of the tables"
    if CHOSEN not in times or BEST not in times:
        return [Verdict(promise, "one of both is missing", False)]
    ratio = times[CHOSEN].us / times[BEST].us
    said = f"{ratio:.3f}; {times[CHOSEN].how} beside {times[BEST].how}"
    return [Verdict(promise, said, ratio <= CHOICE_WITHIN)]


def _compile_time(rows: list[Row]) -> Verdict:
    worst = max(rows, key=lambda row: row.us)
    found = f"longest {worst.us / 1e6:.2f} s, {worst.series} {worst.x}; {len(rows)} compilations"
    return Verdict("a kernel is compiled in under 1 s, without Triton", found, worst.us < COMPILE_US)
