"""Timelines, and overlap losses, as PNG files. The only module that imports matplotlib: import it only to draw.

Each rank is a band of rows. A queue that runs one thing at a time is a row of bars; the programs of a kernel share a
row, whose height is split by how many of them compute, reduce or wait at that time.
"""

from __future__ import annotations

from io import BytesIO
from itertools import accumulate
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle

from overweave.cli.pictures.gantt import COLOURS, MANY_US, lane_order, spans_by_track, time_text
from overweave.errors import InputError
from overweave.ir.timeline.timeline import BEGIN, KINDS, WAIT, SpanKind, Timeline, TimelineSpan
from overweave.tuner.model.overlap_losses import MATMULS, TRANSFER, Losses

# Heights of rows, and of the space between rows and between ranks, in units of _ROW_INCHES.
_BAR, _KERNEL, _BETWEEN, _GAP = 0.55, 1.15, 0.12, 0.5
_ROW_INCHES, _HEAD_INCHES, _COLUMN_INCHES, _DPI = 0.23, 0.62, 9.0, 150
_INK, _DIM, _BAND, _WAITING = "#1b1f24", "#6b7280", "#f3f5f8", "#c9ced6"
_HATCHES = {"collective": "xxx"}  # distinct without colour

DrawnRows = list[tuple[float, float, str, list[TimelineSpan]]]


def save_png(path: Path | BytesIO, *timelines: Timeline, one_scale: bool = True) -> None:
    """Draw the timelines, two a line if there are more than two, all on one scale or each on its own. Raises InputError
    if there are none, or if the file cannot be written."""
    if not timelines:
        raise InputError(f"picture {path}", "no timeline", "Give at least one")
    columns = 2 if len(timelines) > 2 else 1
    lines = [timelines[first : first + columns] for first in range(0, len(timelines), columns)]
    ranks = {id(timeline): _rows(timeline) for timeline in timelines}
    heights = [max(_height(ranks[id(each)]) for each in line) * _ROW_INCHES + _HEAD_INCHES for line in lines]
    layout = ConstrainedLayoutEngine(hspace=0.06, wspace=0.03)
    figure = Figure(figsize=(_COLUMN_INCHES * columns, sum(heights) + 0.45), dpi=_DPI, layout=layout)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(lines), columns, squeeze=False, height_ratios=heights)
    longest_us = max(timeline.total_us for timeline in timelines)
    for axis in axes.flat[len(timelines) :]:
        axis.set_visible(False)
    for axis, timeline in zip(axes.flat, timelines, strict=False):
        _draw(axis, timeline, ranks[id(timeline)], longest_us if one_scale else timeline.total_us)
    kinds = {span.kind for timeline in timelines for span in timeline.spans}
    patches = [Patch(facecolor=_colour(kind), label=kind, hatch=_HATCHES.get(kind)) for kind in KINDS if kind in kinds]
    if patches:
        figure.legend(
            handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9,
            labelcolor=_INK, handlelength=1.2, handleheight=1.0,
        )  # fmt: skip
    try:
        figure.savefig(path, format="png", facecolor="white")
    except OSError as error:
        raise InputError(f"write {path}", str(error), "Name a file that can be written") from None


def _draw(axis: Axes, timeline: Timeline, ranks: list[DrawnRows], until_us: float) -> None:
    """Draw one timeline on an axis, a band for each rank."""
    until_us = until_us or 1.0
    for rank, rows in enumerate(ranks):
        if not rows:
            continue
        top, bottom = rows[0][0] - _GAP / 3, rows[-1][1] + _GAP / 3
        axis.add_patch(Rectangle((0, top), until_us, bottom - top, facecolor=_BAND, linewidth=0, zorder=0))
        middle = (top + bottom) / 2
        axis.text(
            -0.088, middle, f"rank {rank}", transform=axis.get_yaxis_transform(), ha="center", va="center",
            fontsize=9, fontweight="bold", color=_INK, rotation=90,
        )  # fmt: skip
        for low, high, _, spans in rows:
            _draw_row(axis, (low, high), spans)
    places = [((low + high) / 2, name) for rows in ranks for low, high, name, _ in rows]
    axis.set_yticks([place for place, _ in places], [name for _, name in places], fontsize=7.5, color=_DIM)
    axis.set_ylim(_height(ranks), -_GAP / 2)
    axis.set_xlim(0, until_us)
    axis.tick_params(axis="both", length=0, colors=_DIM)
    axis.tick_params(axis="x", labelsize=8)
    unit, scale = ("us", 1.0) if until_us < MANY_US else ("ms", 1e3)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / scale:g} {unit}")
    axis.grid(axis="x", color="#dfe3e8", linewidth=0.6, zorder=0.5)
    axis.set_axisbelow(True)
    axis.spines[:].set_visible(False)
    axis.set_title(timeline.name, fontsize=10.5, fontweight="bold", loc="left", color=_INK, pad=5)
    hidden = f", {timeline.hidden_share():.1%} of communication hidden"
    axis.set_title(
        f"{timeline.source}, {time_text(timeline.total_us)}{hidden}", fontsize=9, loc="right", color=_DIM, pad=5
    )


def _draw_row(axis: Axes, place: tuple[float, float], spans: list[TimelineSpan]) -> None:
    low, high = place
    if _is_kernel(spans):
        _draw_programs(axis, place, [span for span in spans if span.kind != BEGIN])
        spans = [span for span in spans if span.kind == BEGIN]
    for kind in sorted(KINDS, key=lambda kind: kind != WAIT):  # waits lie under what ran meanwhile
        bars = [(span.begin_us, span.end_us - span.begin_us) for span in spans if span.kind == kind]
        if bars:
            # An edge of the same colour keeps bars visible that are shorter than a pixel.
            colour, thin = _colour(kind), 0.3 * (high - low) if kind == WAIT else 0.0
            axis.broken_barh(
                bars, (low + thin, high - low - 2 * thin), facecolors=colour, edgecolor=colour, linewidth=0.5,
                hatch=_HATCHES.get(kind), zorder=2,
            )  # fmt: skip


def _draw_programs(axis: Axes, place: tuple[float, float], spans: list[TimelineSpan]) -> None:
    """The share of a kernel's programs that do each thing, stacked from below, over time."""
    low, high = place
    programs = len({span.track for span in spans})
    times = sorted({time for span in spans for time in (span.begin_us, span.end_us)})
    position = {time: index for index, time in enumerate(times)}
    base = [high] * len(times)
    for kind in (kind for kind in KINDS if any(span.kind == kind for span in spans)):
        changes = [0] * len(times)
        for span in spans:
            if span.kind == kind:
                changes[position[span.begin_us]] += 1
                changes[position[span.end_us]] -= 1
        shares = [running / programs * (high - low) for running in accumulate(changes)]
        tops = [bottom - share for bottom, share in zip(base, shares, strict=True)]
        axis.fill_between(times, base, tops, step="post", color=_colour(kind), linewidth=0, zorder=2)
        base = tops


def _rows(timeline: Timeline) -> list[DrawnRows]:
    """Return (top, bottom, label, spans) of each row of each rank."""
    ranks: list[DrawnRows] = []
    tracks_of: list[dict[str, list[TimelineSpan]]] = [{} for _ in range(timeline.world_size)]
    for (rank, track), spans in spans_by_track(timeline).items():
        tracks_of[rank][track] = spans
    next_top = 0.0
    for tracks in tracks_of:
        rows: DrawnRows = []
        for track, spans in sorted(tracks.items(), key=lane_order):
            height = _KERNEL if _is_kernel(spans) else _BAR
            rows.append((next_top, next_top + height, track, spans))
            next_top += height + _BETWEEN
        ranks.append(rows)
        next_top += _GAP
    return ranks


def _is_kernel(spans: list[TimelineSpan]) -> bool:
    """Whether several programs share the row."""
    return len({span.track for span in spans if span.kind != BEGIN}) > 1


def _height(ranks: list[DrawnRows]) -> float:
    return max((rows[-1][1] for rows in ranks if rows), default=1.0) + _GAP / 2


def _colour(kind: SpanKind) -> str:
    return _WAITING if kind == WAIT else COLOURS[kind]


_BARS = ("#2f6fb3", "#e08a1e", "#8fb8de", "#f3c587", "#5a9e6f", "#a9678f", "#777777", "#c44e52", "#2e4057")
_LOSS_INCHES, _HIGH, _LOSS_DPI = 11.0, 2.6, 130


def save_losses(cases: list[Losses], title: str) -> bytes:
    """Return FiCCO's Figures 7 to 10 as a PNG file: losses of cut matmuls by op-to-byte, of cut transfers and of
    concurrent work by memory traffic, and the share of each kind in a case's losses."""
    names = tuple(cases[0].factors)
    contention = tuple(name for name in names if "beside" in name)
    panels = [
        ("7: cut matmuls, by op-to-byte", tuple(name for name in names if name in MATMULS), "op_to_byte"),
        ("8: cut transfers, by memory traffic", tuple(name for name in names if name == TRANSFER), "traffic_bytes"),
        ("9: beside each other, by memory traffic", contention, "traffic_bytes"),
    ]
    panels_with_data = [panel for panel in panels if panel[1]]
    figure = Figure(figsize=(_LOSS_INCHES, _HIGH * (len(panels_with_data) + 1)), dpi=_LOSS_DPI, layout="constrained")
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
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [place + index * width for place in range(len(cases))]
        axes.bar(places, [each.factors[name] - 1 for each in cases], width, 1.0, color=_BARS[index % 9], label=name)
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
        axes.bar(range(len(cases)), shares, 0.8, below, color=_BARS[index % 9], label=name)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    axes.set_title("10: shares of all losses, by operations", fontsize=8, loc="left")
    _label(axes, cases)


def _label(axes: Axes, cases: list[Losses]) -> None:
    axes.set_xticks(range(len(cases)), [each.case for each in cases], fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=6, ncols=4)
