"""FiCCO's Figures 7 to 10 as one picture: bars of what cutting and overlapping lose, a panel for each kind of loss."""

from __future__ import annotations

from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from overweave.tuner.model.overlap_losses import MATMULS, TRANSFER, Losses

_COLOURS = ("#2f6fb3", "#e08a1e", "#8fb8de", "#f3c587", "#5a9e6f", "#a9678f", "#777777", "#c44e52", "#2e4057")
_INCHES, _HIGH, _DPI = 11.0, 2.6, 130


def save_losses(found: list[Losses], title: str) -> bytes:
    """A PNG file: cut matmuls by op-to-byte (7), cut transfers and what runs together by memory traffic (8, 9), and the
    share that each kind has of a case's losses (10).
    """
    names = tuple(found[0].factors)
    beside = tuple(name for name in names if "beside" in name)
    panels = [
        ("7: cut matmuls, by op-to-byte", tuple(name for name in names if name in MATMULS), "op_to_byte"),
        ("8: cut transfers, by memory traffic", tuple(name for name in names if name == TRANSFER), "traffic_bytes"),
        ("9: beside each other, by memory traffic", beside, "traffic_bytes"),
    ]
    shown = [panel for panel in panels if panel[1]]
    figure = Figure(figsize=(_INCHES, _HIGH * (len(shown) + 1)), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9)
    rows = figure.subplots(len(shown) + 1, 1, squeeze=False)
    for (axes,), (head, wanted, order) in zip(rows, shown, strict=False):
        _draw_bars(axes, sorted(found, key=lambda each: getattr(each, order)), wanted)
        axes.set_title(head, fontsize=8, loc="left")
    _draw_shares(rows[-1][0], sorted(found, key=lambda each: each.op_to_byte * each.traffic_bytes), names)
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()


def _draw_bars(axes: Axes, found: list[Losses], names: tuple[str, ...]) -> None:
    """A bar for each loss of each case, from 1 on."""
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [place + index * width for place in range(len(found))]
        axes.bar(places, [each.factors[name] - 1 for each in found], width, 1.0, color=_COLOURS[index % 9], label=name)
    axes.axhline(1.0, color="#1b1f24", linewidth=0.6)
    axes.set_yscale("log", base=2)
    _label(axes, found)


def _draw_shares(axes: Axes, found: list[Losses], names: tuple[str, ...]) -> None:
    """How much of a case's losses each one is, from the least operations to the most."""
    below = [0.0] * len(found)
    for index, name in enumerate(names):
        lost = [max(each.factors[name] - 1, 0.0) for each in found]
        whole = [sum(max(value - 1, 0.0) for value in each.factors.values()) or 1.0 for each in found]
        shares = [one / all_of_it for one, all_of_it in zip(lost, whole, strict=True)]
        axes.bar(range(len(found)), shares, 0.8, below, color=_COLOURS[index % 9], label=name)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    axes.set_title("10: shares of all losses, by operations", fontsize=8, loc="left")
    _label(axes, found)


def _label(axes: Axes, found: list[Losses]) -> None:
    axes.set_xticks(range(len(found)), [each.case for each in found], fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=6, ncols=4)
