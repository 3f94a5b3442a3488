"""A study as a PNG file: one panel per operator and layer, a line per series, the roofs of the run beneath."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from campaigns.choices.study_table import Point, Study

INK, DIM, GRID = "#1b1f24", "#6b7280", "#dfe3e8"
LINES = ("#2563eb", "#d97706", "#059669", "#9333ea")  # told apart by their markers, too
MARKERS = ("o", "s", "^", "D")
_PANEL_INCHES, _DPI = (4.2, 2.9), 150
_ROOFS = (("matmul_us", "matmul alone", ":"), ("ceiling_us", "ceiling", "--"), ("sequential_us", "library", "-."))


def save_study(path: Path, study: Study, points: Sequence[Point]) -> None:
    """Draws all points. The columns are layers, the rows operators."""
    operators = list(dict.fromkeys(point.operator for point in points))
    layers = list(dict.fromkeys(point.layer for point in points))
    size = (_PANEL_INCHES[0] * len(layers), _PANEL_INCHES[1] * len(operators) + 0.5)
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(operators), len(layers), squeeze=False)
    for row, operator in zip(axes, operators, strict=True):
        for axis, layer in zip(row, layers, strict=True):
            _draw(axis, study, [point for point in points if (point.operator, point.layer) == (operator, layer)])
            axis.set_title(f"{operator}\n{layer}", fontsize=8.5, loc="left", color=INK)
    figure.suptitle(study.title, fontsize=11, fontweight="bold", color=INK)
    figure.savefig(path, format="png", facecolor="white")


def _draw(axis: Axes, study: Study, points: Sequence[Point]) -> None:
    places = {x: place for place, x in enumerate(dict.fromkeys(point.x for point in points))}
    for number, series in enumerate(dict.fromkeys(point.series for point in points)):
        timed = [(places[point.x], point.median_us) for point in points if point.series == series and point.median_us]
        colour, marker = LINES[number % len(LINES)], MARKERS[number % len(MARKERS)]
        axis.plot(
            [x for x, _ in timed],
            [us for _, us in timed],
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1.4,
            label=series,
        )
    for field, label, style in _ROOFS:
        height = getattr(points[0], field) if points else None
        if height is not None:
            axis.axhline(height, color=DIM, linestyle=style, linewidth=0.9, label=label)
    axis.set_xticks(list(places.values()), list(places), fontsize=7.5)
    axis.set_xlabel(study.axis, fontsize=8, color=DIM)
    axis.set_ylabel("us", fontsize=8, color=DIM)
    axis.set_ylim(bottom=0)
    axis.tick_params(axis="both", length=0, colors=DIM, labelsize=7.5)
    axis.grid(axis="y", color=GRID, linewidth=0.6)
    axis.spines[:].set_visible(False)
    axis.legend(fontsize=6.5, frameon=False, labelcolor=INK)
