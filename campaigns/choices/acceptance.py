"""Do result files of `overweave bench` show what was promised of the dense operators? One line for each promise.

    python -m campaigns.acceptance FILE ...

Of each file the middle run is read. A row is a case of an operator on a number of ranks, with the baselines of its own
run: nothing of different runs is put into one ratio. The promises are for four ranks and bf16; of others the same lines
are told and not judged, but for "never slower", which holds everywhere. Exit code 1 if a promise is broken.
A file may also be a table that `overweave tune --json` wrote: there the model's choice is held against the tuned one.
What no such file can show is named at the end, with the command that judges it.

Never slower: no row whose 95 % upper bound of (best baseline's time / ours), over at least five interleaved rounds,
lies below 0.98. The best baseline is the quicker one of the library and of what torch ships. Where the link is the
bound, that is where communication alone takes longer than the matmul, ours is held against communication alone, by
NCCL or the copy engine, and not against the ceiling."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from campaigns.choices import cold_choice
from campaigns.verdict import Verdict
from overweave.errors import InputError
from overweave.ir.operators import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from overweave.ir.operators.registry import operator_of
from overweave.tuner.measure.baselines import CEILING, COMMUNICATION, COPIES, MATMUL, OURS, SEQUENTIAL, TORCH_FUSED
from overweave.tuner.measure.bench import BenchRun, CaseRows, MethodRow
from overweave.tuner.measure.timer import Ratio, geometric_mean
from overweave.tuner.space.shapes import ShapeCase

FEWEST_ROUNDS, NOT_SLOWER, JUDGED_RANKS = 5, 0.98, 4
HOST_US = 30.0
WHOLE_RUNS, REPLAYED_ROWS, FP8_RATIO = 3, 512, 1.4
# What result files cannot show, and which command does.
ELSEWHERE = {
    "tile kernels alone against cuBLAS": "campaigns.rates.gpu_tile_choice",
    "the error of fp8": "campaigns.exact.gpu_epilogues",
    "a replay beyond its kernels; the host, plan by plan": "campaigns.host.gpu_host_cost",
    "exactness, repeats with late ranks": "campaigns.exact.gpu_exactness",
    "beside another library's collective": "campaigns.rates.gpu_beside",
    "absent and late ranks": "campaigns.exact.gpu_faults",
    "caches that differ or are broken": "tests/ops/test_tune.py, tests/tuner/store/test_cache.py",
}


class Report(Struct):
    """A result file: several whole runs, of which the middle one is quoted. unfinished: how far, of one that is not."""

    runs: tuple[BenchRun, ...]
    middle: int
    unfinished: str = ""


class Row(Struct, frozen=True):
    """One case as one run measured it. operator, ranks and dtype: of the run. runs: of which it is the middle one.

    unfinished: how far the bench came whose file holds it; empty where it came to its end.
    """

    operator: str
    ranks: int
    rounds: int
    rows: CaseRows
    dtype: str = "bf16"
    runs: int = 1
    unfinished: str = ""

    @property
    def case(self) -> ShapeCase:
        return self.rows.case

    @property
    def is_mlp(self) -> bool:
        return self.case.name.startswith("MLP-")

    @property
    def ours(self) -> MethodRow | None:
        return self.of(OURS)

    def of(self, name: str) -> MethodRow | None:
        return next((row for row in self.rows.methods if row.name == name), None)

    def over(self, *names: str) -> float | None:
        """Our time over the least of some methods'; None where none of them, or ours, was measured."""
        times = [row.median_us for name in names if (row := self.of(name)) is not None]
        return self.ours.median_us / min(times) if times and self.ours is not None else None

    def speedup(self, baseline: str) -> float | None:
        ratio = self.ours.speedups.get(baseline) if self.ours is not None else None
        return None if ratio is None else ratio.value

    @property
    def against_best(self) -> Ratio | None:
        """The best baseline's time over ours, with its interval."""
        return min(self.ours.speedups.values(), key=lambda ratio: ratio.value, default=None) if self.ours else None

    @property
    def over_best(self) -> float | None:
        return None if self.against_best is None else self.against_best.value

    @property
    def efficiency(self) -> float | None:
        return self.ours.measures.overlap_efficiency if self.ours is not None and self.ours.measures else None

    @property
    def is_link_bound(self) -> bool:
        communication, matmul = self.of(COMMUNICATION), self.of(MATMUL)
        return communication is not None and matmul is not None and communication.median_us > matmul.median_us

    @property
    def behind_ceiling_us(self) -> float | None:
        ceiling = self.of(CEILING)
        return None if ceiling is None or self.ours is None else self.ours.median_us - ceiling.median_us

    @property
    def eager_host_us(self) -> float | None:
        return None if self.rows.is_replayed or self.ours is None else self.ours.host_us


class Kind(NamedTuple):
    """How a number of a row is told and judged. is_least: limits lie below it. is_geometric: its mean."""

    told: str
    value: Callable[[Row], float | None]
    is_least: bool = False
    is_geometric: bool = False


KINDS: dict[Quantity, Kind] = {
    "of_ceiling": Kind("times the ceiling", lambda row: row.over(CEILING)),
    "beyond_ceiling_us": Kind("us beyond the ceiling", attrgetter("behind_ceiling_us")),
    "of_communication": Kind("times communication alone", lambda row: row.over(COMMUNICATION, COPIES)),
    "efficiency": Kind("overlap efficiency", attrgetter("efficiency"), is_least=True),
    "against_library": Kind("against NCCL + cuBLAS", lambda row: row.speedup(SEQUENTIAL), True, True),
    "against_torch": Kind("against torch's fused", lambda row: row.speedup(TORCH_FUSED), True, True),
    "against_best": Kind("against the best of NCCL and torch", attrgetter("over_best"), True, True),
}
HOST = Kind("us of the host for an eager call", attrgetter("eager_host_us"))


def in_cases(row: Row, cases: Cases) -> bool:
    """Whether a bar's cases hold a row's."""
    most_m = row.case.m if cases.most_m is None else cases.most_m
    is_bound = cases.link_bound in (None, row.is_link_bound)
    return is_bound and cases.least_m <= row.case.m <= most_m and re.match(cases.shapes, row.case.name) is not None


def kept(what: str, bar: Bar, rows: list[Row]) -> list[Verdict]:
    """Whether the rows of an operator keep a bar of its record."""
    kind = KINDS[bar.of]
    chosen = [row for row in rows if in_cases(row, bar.cases)]
    return bounded(f"{what}, {bar.cases.label}: {kind.told}", chosen, kind, (bar.mean, bar.each))


def bounded(promise: str, rows: Iterable[Row], kind: Kind, limits: tuple[float | None, float | None]) -> list[Verdict]:
    """One verdict, of the mean of a number and of its worst; none where no row has the number."""
    found = [(number, row) for row in rows if (number := kind.value(row)) is not None]
    if not found:
        return []
    numbers, (of_mean, of_each) = [number for number, _ in found], limits
    mean = geometric_mean(numbers) if kind.is_geometric else sum(numbers) / len(numbers)
    worst, row = (min if kind.is_least else max)(found, key=lambda each: each[0])

    def keeps(number: float, limit: float | None) -> bool:
        return limit is None or (number >= limit if kind.is_least else number <= limit)

    named, side = ("geometric mean" if kind.is_geometric else "mean"), ("at least" if kind.is_least else "at most")
    told = f"{named} {mean:.3f}{_limit(side, of_mean)}, worst {worst:.3f}{_limit(side, of_each)}"
    holds = keeps(mean, of_mean) and keeps(worst, of_each)
    return [Verdict(promise, f"{told} ({row.case.name}), {len(found)} rows", holds)]


def _limit(side: str, limit: float | None) -> str:
    return "" if limit is None else f" ({side} {limit:g})"


def never_slower(promise: str, rows: list[Row]) -> list[Verdict]:
    judged = [(ratio, row) for row in rows if row.rounds >= FEWEST_ROUNDS and (ratio := row.against_best) is not None]
    if not judged:
        return [Verdict(promise, f"no row of {len(rows)} has ours and {FEWEST_ROUNDS} rounds", False)]
    lost = [(ratio, row) for ratio, row in judged if ratio.high < NOT_SLOWER]
    shown = sorted(lost, key=lambda each: each[0].value) or [min(judged, key=lambda each: each[0].value)]
    worst = "; ".join(f"{row.case.name} {ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})" for ratio, row in shown)
    return [
        Verdict(promise, f"{len(lost)} of {len(judged)} rows lose; {'lost' if lost else 'least'}: {worst}", not lost)
    ]


def verdicts(rows: list[Row]) -> list[Verdict]:
    """All promises over all rows, by operator and number of ranks."""
    found: list[Verdict] = []
    for (operator, ranks, dtype), group in groupby(sorted(rows, key=_run_of), key=_run_of):
        own, what = list(group), f"{operator} {'' if dtype == 'bf16' else dtype + ' '}W={ranks}"
        absent = [row.case.name for row in own if row.ours is None]
        told = f"absent from {len(absent)} of {len(own)} rows {', '.join(absent[:8])}".rstrip()
        found += [Verdict(f"{what}: ours ran", told, not absent), *never_slower(f"{what}: never slower", own)]
        found += as_finished(what, own) + as_captured(what, own)
        promised = [verdict for bar in BARS.get(operator, ()) for verdict in kept(what, bar, own)]
        promised += as_repeated(what, own)
        promised += bounded(f"{what}: {HOST.told}", own, HOST, (None, HOST_US))
        judged = ranks == JUDGED_RANKS and dtype == "bf16"
        found += promised if judged else [verdict._replace(holds=None) for verdict in promised]
    return (found + of_fp8(rows)) or [Verdict("rows to judge", "none", False)]


def as_finished(what: str, rows: list[Row]) -> list[Verdict]:
    """What a file lacks may be what breaks a promise: one that is unfinished keeps none."""
    told = dict.fromkeys(row.unfinished for row in rows if row.unfinished)
    return [Verdict(f"{what}: all that was asked for", f"unfinished, {so_far}", False) for so_far in told]


def as_captured(what: str, rows: list[Row]) -> list[Verdict]:
    """Whether decoding sizes were timed as they run."""
    few = [row for row in rows if row.case.m <= REPLAYED_ROWS]
    eager = [row.case.name for row in few if not row.rows.is_replayed]
    promise = f"{what}, up to {REPLAYED_ROWS} rows: all methods as captured graphs"
    return [Verdict(promise, f"{len(few) - len(eager)} of {len(few)} rows", not eager)] if few else []


def as_repeated(what: str, rows: list[Row]) -> list[Verdict]:
    """Whether the mlp set was run often enough for its middle run to mean something."""
    mlp = [row for row in rows if row.is_mlp]
    often = [row for row in mlp if row.runs >= WHOLE_RUNS]
    told = f"{len(often)} of {len(mlp)} rows are of {WHOLE_RUNS} whole runs or more"
    return [Verdict(f"{what}, mlp: the middle of several runs", told, often == mlp)] if mlp else []


def of_fp8(rows: list[Row]) -> list[Verdict]:
    """How much quicker fp8 is than bf16, told only: they are of different runs."""
    by_case = {(row.operator, row.ranks, row.case, row.dtype): row.ours for row in rows}
    found = []
    for (operator, ranks, case, dtype), ours in by_case.items():
        other = by_case.get((operator, ranks, case, "bf16"))
        if dtype == "fp8" and ours is not None and other is not None:
            told = f"{other.median_us / ours.median_us:.3f} times as fast as bf16 (at least {FP8_RATIO}), another run"
            found.append(Verdict(f"{operator} W={ranks}, {case.name} in fp8", told, None))
    return found


def of_table(path: Path) -> list[Verdict]:
    """How quick what the model chooses unmeasured is, beside what tuning found. Raises InputError."""
    known = cold_choice.read(path)
    name, ranks = path.name, max((entry.problem.world_size for entry in known), default=0)
    speeds = [share.share for share in cold_choice.shares(known)]
    promise = f"{name} W={ranks}: the model's choice, of the tuned speed"
    if not speeds:
        return [Verdict(promise, "none of its choices was measured", False)]
    mean = sum(speeds) / len(speeds)
    told = f"mean {mean:.3f} (at least {cold_choice.LEAST_MEAN}), worst {min(speeds):.3f}, {len(speeds)} problems"
    return [Verdict(promise, f"{told} of {len(known)}", mean >= cold_choice.LEAST_MEAN)]


def read(path: Path) -> list[Row]:
    """The rows of the middle run of a result file. Raises InputError for a file that is none."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
        run = report.runs[report.middle]
        operator_of(run.operator)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise InputError(f"results {path}", str(error), "Give files that `overweave bench --json` wrote") from error
    runs = sum(len(each.cases) == len(run.cases) for each in report.runs)
    told = run.dtype, runs, report.unfinished
    return [Row(run.operator, run.world_size, run.effort.rounds, case, *told) for case in run.cases]


def _is_table(path: Path) -> bool:
    try:
        return b'"fingerprint"' in path.read_bytes()[:4096]
    except OSError:
        return False


def _run_of(row: Row) -> tuple[str, int, str]:
    return row.operator, row.ranks, row.dtype


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    files = parser.parse_args(arguments).files
    tables = [path for path in files if _is_table(path)]
    try:
        rows = [row for path in files if path not in tables for row in read(path)]
        found = [verdict for path in tables for verdict in of_table(path)]
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    found = (verdicts(rows) if rows or not tables else []) + found
    print(*found, *(f"else  {promise}: {command}" for promise, command in ELSEWHERE.items()), sep="\n")
    return int(any(verdict.holds is False for verdict in found))


if __name__ == "__main__":
    sys.exit(main())


# Acceptance limits of the dense operators' times on four ranks in bf16, as data: a quantity, the cases, the limits.

# of_ceiling: our time / that of a matmul beside copies. beyond_ceiling_us: our time - that. of_communication: ours /
# that of communication alone, by NCCL or the copy engine. efficiency: of overlap. against_...: speedup over cuBLAS and
# NCCL in sequence, over torch's fused operator, over the fastest of all baselines.
Quantity = Literal[
    "of_ceiling", "beyond_ceiling_us", "of_communication", "efficiency",
    "against_library", "against_torch", "against_best",
]  # fmt: skip


class Cases(Struct, frozen=True, kw_only=True):
    """The cases of a bar. shapes: a pattern of how names begin. least_m, most_m: rows. link_bound: None for all."""

    label: str
    shapes: str = ""
    least_m: int = 0
    most_m: int | None = None
    link_bound: bool | None = None


class Bar(Struct, frozen=True, kw_only=True):
    """A limit that the mean of a number over cases, and each of them, must keep. None: no such limit."""

    of: Quantity
    cases: Cases
    mean: float | None = None
    each: float | None = None


MLP = Cases(label="mlp", shapes="MLP-")
MANY_ROWS = Cases(label="1,024 rows on", least_m=1024)
LINK_BOUND = Cases(label="where the link is the bound", link_bound=True)
# Limits of both operators with row shards against torch and NCCL.
SHARDED = (Bar(of="against_torch", cases=MANY_ROWS, mean=1.12), Bar(of="against_library", cases=MLP, mean=1.3))

_NO_MLP = "(?!MLP-)"
_MANY_ROWS = Cases(label="other shapes of 4,096 rows on", shapes=_NO_MLP, least_m=4096, link_bound=False)
_FEW_ROWS = Cases(label="fewer rows", shapes=_NO_MLP, most_m=4095, link_bound=False)
_LAYERS = r"Llama-3-(8B|70B)\.(o|down)\."  # where an all-reduce follows a matmul
_PREFILL = Cases(label="1,024 to 8,192 tokens", shapes=_LAYERS, least_m=1024, most_m=8192)
_DECODING = Cases(label="1 to 256 tokens", shapes=_LAYERS, most_m=256)

BARS: Mapping[str, tuple[Bar, ...]] = {
    all_gather_matmul.OPERATOR.name: (
        Bar(of="of_ceiling", cases=MLP, mean=1.03, each=1.05),
        Bar(of="efficiency", cases=MLP, mean=0.88, each=0.8),
        Bar(of="of_ceiling", cases=_MANY_ROWS, mean=1.04),
        Bar(of="beyond_ceiling_us", cases=_FEW_ROWS, each=12.0),
        Bar(of="of_communication", cases=LINK_BOUND, each=1.12),
        *SHARDED,
    ),
    matmul_reduce_scatter.OPERATOR.name: (
        Bar(of="efficiency", cases=MLP, mean=0.83, each=0.75),
        Bar(of="of_communication", cases=LINK_BOUND, each=1.25),
        *SHARDED,
    ),
    matmul_all_reduce.OPERATOR.name: (
        Bar(of="against_library", cases=_PREFILL, mean=1.4),
        Bar(of="against_best", cases=_DECODING, mean=1.15),
    ),
}
