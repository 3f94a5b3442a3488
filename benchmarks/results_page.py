"""Writes docs/results.md, the evidence table of docs/guarantees.md and docs/pictures/speedup.svg from the result files.

python -m benchmarks.results_page          writes them
python -m benchmarks.results_page --check  exit 1 if they are not what the files say
"""

from __future__ import annotations

import argparse
import json
import sys
from math import isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.speedup_chart import bars_of, draw, geometric_mean, shown_in
from overweave.ir.operators.registry import OPERATORS
from overweave.schedules.methods.registry import methods_for

ROOT = Path(__file__).parent.parent
GUARANTEES, PAGE, CHART = (
    ROOT / "docs" / "guarantees.md",
    ROOT / "docs" / "results.md",
    ROOT / "docs" / "pictures" / "speedup.svg",
)
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- evidence: begin -->", "<!-- evidence: end -->"
OURS, LIBRARY, TORCH, MATMUL = "overweave", "sequential", "torch_fused", "matmul"
COLUMNS = ("case", "matmul alone", "ceiling", "NCCL + cuBLAS", "torch fused", "per shard", "**overweave**")
IN_COLUMN = {"per_peer": "per_shard"}  # what stands for shards in an all-to-all
NAMES = (MATMUL, "ceiling", LIBRARY, TORCH, "per_shard", OURS)
HEAD = """# Results of the operators

`python -m benchmarks.results_page` writes this page from the files in `benchmarks/results`. Nothing is typed by hand.

All methods of a row were interleaved in one run, in at least 30 paired rounds, with ranks aligned and random data. The
slowest rank counts. The ceiling is a matmul beside copies of the same size on which the matmul does not depend. The
cases are those of `benchmarks/shapes/mlp.*.json`; `make bench` repeats the runs on the GPUs at hand. NVLink multicast
was off everywhere: NCCL can be quicker with it, in groups of three ranks and more.

![Time of a call against NCCL + cuBLAS](pictures/speedup.svg)
"""
OF_MLP, OF_EXPERTS = ("mlp", "tuned"), ("moe",)  # what files are called that hold these sets
EXPERTS = """# Layers of experts

The cases are those of `benchmarks/shapes/moe.*.json`: rows that go to the ranks of their experts, or come back.
torch has no fused operator for them. How old a file is says by which tables its plans were chosen.
"""


class Latest(NamedTuple):
    """The file that counts for one operator and world size."""

    name: str
    report: dict[str, Any]

    @property
    def middle(self) -> dict[str, Any]:
        """The middle run."""
        run: dict[str, Any] = self.report["runs"][self.report["middle"]]
        return run

    def ratios(self, base: str) -> list[float]:
        """For each case: the time of a baseline over ours."""
        ours = (method for case in self.middle["cases"] for method in case["methods"] if method["name"] == OURS)
        return [method["speedups"][base]["value"] for method in ours if base in method["speedups"]]


def latest(names: tuple[str, ...] = OF_MLP) -> list[Latest]:
    """By operator and world size: the latest of the files of these names, a finished one if any."""
    found: dict[tuple[str, int], Latest] = {}
    for path in (path for name in names for path in RESULTS.glob(f"{name}.*.json")):
        read = Latest(path.name, json.loads(path.read_text()))
        run = read.report["runs"][0]
        key = (run["operator"], run["world_size"])
        if key not in found or _standing(read.report) > _standing(found[key].report):
            found[key] = read
    return [found[key] for key in sorted(found)]


def _standing(report: dict[str, Any]) -> tuple[bool, str]:
    """The higher, the more it is to be shown."""
    return not report.get("unfinished"), report["runs"][0]["date"]


def table(read: Latest) -> str:
    """The middle run of one report, in microseconds, with the means and their spread."""
    run, report = read.middle, read.report
    runs = f"**unfinished: {report['unfinished']}**" if report.get("unfinished") else f"{len(report['runs'])} runs"
    lines = [
        f"## {run['operator']}, {run['world_size']} x {run['devices'][0]}",
        "",
        f"{run['dtype']}, {run['date'][:10]}, torch {run['versions']['torch']}, triton {run['versions']['triton']};"
        f" the middle of {runs}, in us; `{read.name}`.",
        "",
        "| " + " | ".join((*COLUMNS, "against NCCL + cuBLAS", "against torch", "overlap efficiency")) + " |",
        "| --- |" + " ---: |" * (len(COLUMNS) + 2),
    ]
    lines += [row(case) for case in run["cases"]]
    return "\n".join([*lines, "", summary(read), ""])


def row(case: dict[str, Any]) -> str:
    """One case: medians, then what ours is worth. A dash: the method did not run."""
    methods = {IN_COLUMN.get(method["name"], method["name"]): method for method in case["methods"]}
    ours = methods[OURS]
    times = [f"{methods[name]['median_us']:.0f}" if name in methods else "-" for name in NAMES]
    speedups = [
        f"{ours['speedups'][base]['value']:.2f}" if base in ours["speedups"] else "-" for base in (LIBRARY, TORCH)
    ]
    hidden = ours["measures"]["overlap_efficiency"]  # of communication, where there is any to hide
    efficiency = "-" if hidden is None else f"{hidden:.2f}"
    return "| " + " | ".join([case["case"]["name"], *times, *speedups, efficiency]) + " |"


def summary(read: Latest) -> str:
    """The means over the cases, host time, and how the whole runs spread."""
    run = read.middle
    ours = [method for case in run["cases"] for method in case["methods"] if method["name"] == OURS]
    host = sum(method["host_us"] for method in ours) / len(ours)
    all_runs = [_efficiency(each) for each in read.report["runs"] if len(each["cases"]) == len(run["cases"])]
    against_library, against_torch = (geometric_mean(read.ratios(base)) for base in (LIBRARY, TORCH))
    beside_torch = f", {against_torch:.3f} times torch" if not isnan(against_torch) else ""
    return (
        f"Geometric mean {against_library:.2f} times NCCL + cuBLAS{beside_torch}; overlap efficiency"
        f" {_efficiency(run):.2f} in the mean (whole runs: {min(all_runs):.2f} to {max(all_runs):.2f}); host"
        f" {host:.0f} us a call."
    )


def _efficiency(run: dict[str, Any]) -> float:
    ours = [method for case in run["cases"] for method in case["methods"] if method["name"] == OURS]
    hidden = [each for method in ours if (each := method["measures"]["overlap_efficiency"]) is not None]
    return float(sum(hidden) / len(hidden)) if hidden else nan


def evidence() -> str:
    """How many methods are proven and emulated, and on how many GPUs how many rows of problems were timed."""
    rows = dict[tuple[str, int], int]()
    for path in RESULTS.glob("*.json"):
        for run in json.loads(path.read_text())["runs"][:1]:
            key = (run["operator"], run["world_size"])
            rows[key] = rows.get(key, 0) + len(run["cases"])
    lines = [
        "| operator | methods | proven, 1 to 8 ranks | emulated, bit-exact | timed rows, 2 GPUs | timed rows, 4 GPUs |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in OPERATORS:
        timed = " | ".join(str(rows.get((name, ranks), 0)) for ranks in (2, 4))
        lines.append(f"| `{name}` | {len(methods_for(name))} | all | all | {timed} |")
    return "\n".join(lines) + "\n"


def with_evidence(text: str) -> str:
    """The page of guarantees with its table as the files say."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{evidence()}{END}{after}"


def page() -> str:
    """docs/results.md."""
    return "\n".join([HEAD, *map(table, latest()), EXPERTS, *map(table, latest(OF_EXPERTS))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    bars = bars_of(latest())
    wanted = {GUARANTEES: with_evidence(GUARANTEES.read_text()), PAGE: page()}
    differing = [path.name for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    differing += [] if shown_in(CHART) == bars else [CHART.name]
    if is_check and differing:
        sys.exit(f"{', '.join(differing)} differ from benchmarks/results: run python -m benchmarks.results_page")
    if not is_check:
        for path, text in wanted.items():
            path.write_text(text)
        draw(CHART, bars)


if __name__ == "__main__":
    main()
