"""Writes the measured tables of README.md from the result files, between their markers.

python -m benchmarks.readme_table          rewrites README.md
python -m benchmarks.readme_table --check  exit 1 if README.md is not what the files say
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
OURS, LIBRARY, TORCH, MATMUL = "overweave", "sequential", "torch_fused", "matmul"
COLUMNS = ("case", "matmul alone", "ceiling", "NCCL + cuBLAS", "torch fused", "per shard", "**overweave**")
NAMES = (MATMUL, "ceiling", LIBRARY, TORCH, "per_shard", OURS)


def tables() -> str:
    """One table per operator and world size: the latest of the files that hold the `mlp` set, a finished one if any."""
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    for path in (*RESULTS.glob("mlp.*.json"), *RESULTS.glob("tuned.*.json")):
        report = json.loads(path.read_text())
        run = report["runs"][0]
        known = latest.setdefault((run["operator"], run["world_size"]), report)
        if _standing(report) > _standing(known):
            latest[(run["operator"], run["world_size"])] = report
    return "\n".join(table(latest[key]) for key in sorted(latest))


def _standing(report: dict[str, Any]) -> tuple[bool, str]:
    """The higher, the more it is to be shown."""
    return not report.get("unfinished"), report["runs"][0]["date"]


def table(report: dict[str, Any]) -> str:
    """The middle run of one report, in microseconds, with what it says of the losses."""
    run = report["runs"][report["middle"]]
    lines = [
        f"`{run['operator']}`, {run['world_size']} x {run['devices'][0]}, {run['dtype']}, {run['date'][:10]},"
        f" torch {run['versions']['torch']}, triton {run['versions']['triton']}; {_which(report)}, us:",
        "",
        "| " + " | ".join((*COLUMNS, "against NCCL + cuBLAS", "against torch", "overlap efficiency")) + " |",
        "| --- |" + " ---: |" * (len(COLUMNS) + 2),
    ]
    lines += [row(case) for case in run["cases"]]
    return "\n".join([*lines, "", summary(run, report), ""])


def _which(report: dict[str, Any]) -> str:
    so_far = report.get("unfinished")
    return f"**unfinished: {so_far}**" if so_far else f"middle of {len(report['runs'])} runs"


def row(case: dict[str, Any]) -> str:
    """One case: medians, then what ours is worth. A dash: the method did not run."""
    methods = {method["name"]: method for method in case["methods"]}
    ours = methods[OURS]
    times = [f"{methods[name]['median_us']:.0f}" if name in methods else "-" for name in NAMES]
    speedups = [
        f"{ours['speedups'][base]['value']:.2f}" if base in ours["speedups"] else "-" for base in (LIBRARY, TORCH)
    ]
    efficiency = f"{ours['measures']['overlap_efficiency']:.2f}"
    return "| " + " | ".join([case["case"]["name"], *times, *speedups, efficiency]) + " |"


def summary(run: dict[str, Any], report: dict[str, Any]) -> str:
    """The means over the cases, host time, and how the whole runs spread."""
    ours = [method for case in run["cases"] for method in case["methods"] if method["name"] == OURS]
    efficiency = sum(method["measures"]["overlap_efficiency"] for method in ours) / len(ours)
    host = sum(method["host_us"] for method in ours) / len(ours)
    speedups = {
        base: [m["speedups"][base]["value"] for m in ours if base in m["speedups"]] for base in (LIBRARY, TORCH)
    }
    means = {base: product(values) ** (1 / len(values)) for base, values in speedups.items() if values}
    all_runs = [_mean_efficiency(each) for each in report["runs"] if len(each["cases"]) == len(run["cases"])]
    return (
        f"Geometric mean {means[LIBRARY]:.2f} times NCCL + cuBLAS, {means.get(TORCH, float('nan')):.3f} times torch;"
        f" overlap efficiency {efficiency:.2f} in the mean (whole runs: {min(all_runs):.2f} to {max(all_runs):.2f});"
        f" host {host:.0f} us a call."
    )


def _mean_efficiency(run: dict[str, Any]) -> float:
    ours = [method for case in run["cases"] for method in case["methods"] if method["name"] == OURS]
    return float(sum(method["measures"]["overlap_efficiency"] for method in ours) / len(ours))


def product(values: list[float]) -> float:
    """The product of all values."""
    result = 1.0
    for value in values:
        result *= value
    return result


def with_tables(text: str) -> str:
    """The README with its tables as the files say."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = README.read_text()
    wanted = with_tables(text)
    if not parser.parse_args().check:
        README.write_text(wanted)
    elif wanted != text:
        sys.exit("README.md differs from benchmarks/results: run python -m benchmarks.readme_table")


if __name__ == "__main__":
    main()
