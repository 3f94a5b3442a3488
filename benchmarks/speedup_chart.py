"""The bar chart of README.md: what a call takes as a share of NCCL + cuBLAS, in the geometric mean of a result file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import unescape
from math import prod
from pathlib import Path
from typing import Any, Protocol

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

LIBRARY, TORCH = "sequential", "torch_fused"
INK, PALE, MIDDLE, OURS = "#1b1f24", "#c9ced6", "#E69F00", "#0072B2"
DESCRIPTION = re.compile(r"<dc:description>(.*?)</dc:description>", re.DOTALL)


class Measured(Protocol):
    """A result file: its middle run, and for each case a baseline's time over ours."""

    @property
    def middle(self) -> dict[str, Any]: ...
    def ratios(self, base: str) -> list[float]: ...


Bars = dict[str, list[float]]  # label -> shares of the time of NCCL + cuBLAS: torch's fused operator, overweave


def geometric_mean(values: list[float]) -> float:
    """NaN where there are none."""
    return float(prod(values) ** (1 / len(values))) if values else float("nan")


def bars_of(reports: Iterable[Measured]) -> Bars:
    """Two bars a report, rounded as they are shown."""
    bars: Bars = {}
    for report in reports:
        run, ours = report.middle, 1 / geometric_mean(report.ratios(LIBRARY))
        device = str(run["devices"][0]).removeprefix("NVIDIA ")
        label = f"{run['operator']}\n{run['world_size']} x {device}, {run['date'][:10]}"
        bars[label] = [round(ours * geometric_mean(report.ratios(TORCH)), 3), round(ours, 3)]
    return bars


def shown_in(path: Path) -> Bars:
    """The bars that a chart was drawn from: its description holds them."""
    found = DESCRIPTION.search(path.read_text()) if path.exists() else None
    return json.loads(unescape(found[1])) if found else {}


def draw(path: Path, bars: Bars) -> None:
    """Writes the chart, with the bars in its description. The same bars give the same file."""
    with rc_context({"svg.hashsalt": "overweave", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(8.4, 0.62 * len(bars) + 1.0), layout="constrained")
        axes = figure.subplots()
        for at, (label, (torch, ours)) in enumerate(bars.items()):
            for place, share, colour in ((-0.27, 1.0, PALE), (0.0, torch, MIDDLE), (0.27, ours, OURS)):
                axes.barh(at + place, share, height=0.24, color=colour)
                axes.text(share + 0.006, at + place, f"{share:.2f}", va="center", fontsize=8, color=INK)
            axes.text(-0.008, at, label, va="center", ha="right", fontsize=8.5, color=INK)
        for name, colour in (("NCCL + cuBLAS", PALE), ("torch fused", MIDDLE), ("overweave", OURS)):
            axes.barh(0, 0, color=colour, label=name)
        axes.set_xlim(0, 1.08)
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.set_yticks([])
        axes.set_xlabel("time of a call, as a share of NCCL + cuBLAS (less is better)", fontsize=8.5, color=INK)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=8, colors=INK)
        figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8.5)
        FigureCanvasSVG(figure).print_svg(path, metadata={"Description": json.dumps(bars), "Date": None})
