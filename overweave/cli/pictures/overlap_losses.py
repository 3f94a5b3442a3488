"""FiCCO's Figures 7 to 10 as one picture: bars of overlap losses, a panel for each kind."""

from __future__ import annotations

from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from overweave.tuner.model.overlap_losses import MATMULS, TRANSFER, Losses

_COLOURS = ("#2f6fb3", "#e08a1e", "#8fb8de", "#f3c587", "#5a9e6f", "#a9678f", "#777777", "#c44e52", "#2e4057")
_INCHES, _HIGH, _DPI = 11.0, 2.6, 130


def save_losses(cases: list[Losses], title: str) -> bytes:
    """Return a PNG file: cut matmuls by op-to-byte (7), cut transfers and concurrent work by memory traffic (8, 9), and
    the share of each kind in a case's losses (10)."""
    names = tuple(cases[0].factors)
    contention = tuple(name for name in names if "beside" in name)
    panels = [
        ("7: cut matmuls, by op-to-byte", tuple(name for name in names if name in MATMULS), "op_to_byte"),
        ("8: cut transfers, by memory traffic", tuple(name for name in names if name == TRANSFER), "traffic_bytes"),
        ("9: beside each other, by memory traffic", contention, "traffic_bytes"),
    ]
    panels_with_data = [panel for panel in panels if panel[1]]
    figure = Figure(figsize=(_INCHES, _HIGH * (len(panels_with_data) + 1)), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9)
    rows = figure.subplots(len(panels_with_data) + 1, 1, squeeze=False)
    for (axes,), (head, bar_names, order) in zip(rows, panels_with_data, strict=False):
        _draw_bars(axes, sorted(cases, key=lambda each: getattr(each, order)), bar_names)
        axes.set_title(head, fontsize=8, loc="left")
    _draw_shares(rows[-1][0], sorted(cases, key=lambda each: each.op_to_byte * each.traffic_bytes), names)
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw_bars(axes: Axes, cases: list[Losses], names: tuple[str, ...]) -> None:
    """Draw a bar for each loss of each case, from 1 on."""
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [place + index * width for place in range(len(cases))]
        axes.bar(places, [each.factors[name] - 1 for each in cases], width, 1.0, color=_COLOURS[index % 9], label=name)
    axes.axhline(1.0, color="#1b1f24", linewidth=0.6)
    axes.set_yscale("log", base=2)
    _label(axes, cases)


def _draw_shares(axes: Axes, cases: list[Losses], names: tuple[str, ...]) -> None:
    """Draw the share of each loss in a case's losses, from the least operations to the most."""
    below = [0.0] * len(cases)
    for index, name in enumerate(names):
        losses = [max(each.factors[name] - 1, 0.0) for each in cases]
        totals = [sum(max(value - 1, 0.0) for value in each.factors.values()) or 1.0 for each in cases]
        shares = [one / all_of_it for one, all_of_it in zip(losses, totals, strict=True)]
        axes.bar(range(len(cases)), shares, 0.8, below, color=_COLOURS[index % 9], label=name)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    axes.set_title("10: shares of all losses, by operations", fontsize=8, loc="left")
    _label(axes, cases)


def _label(axes: Axes, cases: list[Losses]) -> None:
    axes.set_xticks(range(len(cases)), [each.case for each in cases], fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=6, ncols=4)
