"""A table of compiled kernels as a PNG file: one panel per operator, a line per series."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from campaigns.tables.table_rows import TABLES, Row, grids

PANEL_INCHES, DPI, PANELS_OF_A_LINE = (5.2, 3.6), 130, 3
INK, DIM, GRID = "#1b1f24", "#6b7280", "#dfe3e8"
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#65a30d", "#6b7280")
MARKERS = ("o", "s", "^", "D")
DRAWN = ("against", "backends", "tiles", "streamed", "bandwidth")


def save_table(path: Path, rows: Sequence[Row]) -> None:
    """Draws one table, rates over `x`."""
    panels = list(grids(rows).items())
    columns = min(len(panels), PANELS_OF_A_LINE)
    lines = -(-len(panels) // columns)
    size = (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * lines + 0.4)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, ((_, operator, shape), own) in zip(axes, panels, strict=False):
        _draw(axis, own)
        axis.set_title(f"{operator} {shape}".rstrip(), fontsize=9, loc="left", color=INK)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(TABLES[rows[0].table].title, fontsize=11, fontweight="bold", color=INK)
    figure.savefig(path, format="png", facecolor="white")


def _draw(axis: Axes, rows: Sequence[Row]) -> None:
    table = TABLES[rows[0].table]
    places = {x: place for place, x in enumerate(dict.fromkeys(row.x for row in rows))}
    for number, series in enumerate(dict.fromkeys(row.series for row in rows)):
        points = [(places[row.x], row.rate) for row in rows if row.series == series]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number // len(COLOURS) % len(MARKERS)]
        xs, rates = [x for x, _ in points], [rate for _, rate in points]
        axis.plot(xs, rates, color=colour, marker=marker, markersize=4, linewidth=1.3, label=series)
    axis.set_xticks(list(places.values()), list(places), fontsize=7.5)
    axis.set_xlabel(table.axis, fontsize=8, color=DIM)
    axis.set_ylabel("GB/s" if table.unit == "GB/s" else "TFLOP/s", fontsize=8, color=DIM)
    axis.set_ylim(bottom=0)
    axis.tick_params(axis="both", length=0, colors=DIM, labelsize=7.5)
    axis.grid(axis="y", color=GRID, linewidth=0.6)
    axis.spines[:].set_visible(False)
    axis.legend(fontsize=6.5, frameon=False, labelcolor=INK)
