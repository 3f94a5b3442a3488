"""A Timeline as a PNG file. The only module that imports matplotlib: import it where a picture is asked for."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from overweave.cli.pictures import COLOURS, gathered
from overweave.errors import InputError
from overweave.ir.timeline import KINDS, WAIT, Timeline

_ROW_INCHES, _WIDTH_INCHES, _DPI = 0.28, 10.0, 150
_HATCHES = {"wait": "///", "collective": "xxx"}  # a second sign beside colour


def save_png(path: Path, *timelines: Timeline) -> None:
    """Draws the timelines one above the other, on one scale. Raises InputError if there are none or no file."""
    if not timelines:
        raise InputError(f"picture {path}", "no timeline", "Give at least one")
    rows = [len(gathered(timeline)) for timeline in timelines]
    height = _ROW_INCHES * sum(rows) + 0.9 * len(rows) + 0.5
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=[max(1, row) for row in rows])
    for axis, timeline in zip(axes[:, 0], timelines, strict=True):
        _draw(axis, timeline)
    axes[-1, 0].set_xlabel("time (us)")
    axes[-1, 0].set_xlim(0, max(timeline.total_us for timeline in timelines) * 1.01 or 1.0)
    seen = {span.kind for timeline in timelines for span in timeline.spans}
    patches = [Patch(facecolor=COLOURS[kind], label=kind, hatch=_HATCHES.get(kind)) for kind in KINDS if kind in seen]
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise InputError(f"write {path}", str(error), "Name a file that can be written") from None


def _draw(axis: Axes, timeline: Timeline) -> None:
    tracks = gathered(timeline)
    for row, spans in enumerate(tracks.values()):
        for kind in sorted(KINDS, key=lambda kind: kind != WAIT):  # waits lie under what ran meanwhile
            bars = [(span.begin_us, span.end_us - span.begin_us) for span in spans if span.kind == kind]
            if bars:
                face = COLOURS[kind] if kind != WAIT else "white"
                axis.broken_barh(
                    bars, (row - 0.4, 0.8), facecolors=face, edgecolor=COLOURS[kind] if kind == WAIT else "white",
                    linewidth=0.3, hatch=_HATCHES.get(kind),
                )  # fmt: skip
    axis.set_yticks(range(len(tracks)), [f"rank {rank} {track}" for rank, track in tracks], fontsize=7)
    axis.set_ylim(len(tracks) - 0.5, -0.5)
    axis.set_title(f"{timeline.source}: {timeline.name}, {timeline.total_us:.1f} us", fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
