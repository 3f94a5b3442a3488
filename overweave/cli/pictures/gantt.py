"""A Timeline as text: one row per rank and track, time from left to right, one letterform and colour per kind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from overweave.ir.timeline.timeline import COMMUNICATION, COMPUTE, KINDS, REDUCE, SpanKind, Timeline, TimelineSpan

# The colours of Okabe and Ito, distinct with any colour vision; the glyphs are distinct without colour.
COLOURS: dict[SpanKind, str] = {
    "compute": "#0072B2",
    "copy": "#E69F00",
    "collective": "#D55E00",
    "reduce": "#009E73",
    "wait": "#999999",
    "begin": "#CC79A7",
}
GLYPHS: dict[SpanKind, str] = {
    "compute": "█",
    "copy": "▓",
    "collective": "▒",
    "reduce": "▚",
    "wait": "·",
    "begin": "▏",
}
MANY_US = 10_000  # longer times are shown in milliseconds
WIDEST = 1000  # columns of a table
MOST_DRAWN = 256  # tracks of a timeline
COMPARABLE = 5.0  # up to this ratio timelines share a scale; emulated ranks are a thousand times slower than simulated
_LEAST_SHARE = 0.25  # share of a cell from which on its kind is drawn
_PROGRAM = re.compile(r"\.\d{3}$")


def print_table(console: Console, table: Table) -> None:
    """Print a table whole: a narrow terminal wraps its lines, but no digits are cut."""
    columns = Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum
    if columns > console.width:
        table.width = columns
    console.print(table, crop=False)


def print_gantt(console: Console, *timelines: Timeline) -> None:
    """Draw the timelines one above the other, on one scale, as wide as the console."""
    total = max((timeline.total_us for timeline in timelines), default=0.0)
    rows = [(timeline, spans_by_track(timeline)) for timeline in timelines]
    keys = (key for _, tracks in rows for key in islice(tracks, MOST_DRAWN))
    label = min(max(map(len, map(_label, keys)), default=0), console.width // 2)
    width = max(20, console.width - label - 2)
    for timeline, tracks in rows:
        console.print(Text(f"{timeline.source}: {timeline.name}, {time_text(timeline.total_us)}", style="bold"))
        for key, spans in islice(tracks.items(), MOST_DRAWN):
            line = Text(f"{_label(key)[:label]:<{label}} ")
            line.append_text(_bar(spans, total, width))
            console.print(line, no_wrap=True, overflow="crop")
        if len(tracks) > MOST_DRAWN:
            console.print(f"and {len(tracks) - MOST_DRAWN} more tracks", highlight=False)
    console.print(Text(f"{'':<{label}} 0{time_text(total):>{width - 1}}", style="dim"), no_wrap=True)
    console.print(_legend(span.kind for timeline in timelines for span in timeline.spans))


def spans_by_track(timeline: Timeline) -> dict[tuple[int, str], list[TimelineSpan]]:
    """Return (rank, track) -> spans, in the order of `Timeline.tracks`; a kernel's programs share their queue's
    track."""
    tracks: dict[tuple[int, str], list[TimelineSpan]] = {}
    for rank, track in timeline.tracks():
        tracks.setdefault((rank, _PROGRAM.sub("", track)), [])
    for span in timeline.spans:
        tracks[span.rank, _PROGRAM.sub("", span.track)].append(span)
    return tracks


def lane_order(row: tuple[str, list[TimelineSpan]]) -> tuple[int, str]:
    """Return the sort key of lanes: copies above compute, reductions below: a chunk arrives, is multiplied, is
    summed."""
    kinds = {span.kind for span in row[1]}
    return (1 if COMPUTE in kinds else 2 if REDUCE in kinds else 0), row[0]


def is_on_one_scale(timelines: Sequence[Timeline]) -> bool:
    """Whether one axis shows the times of all timelines."""
    times_us = [timeline.total_us for timeline in timelines]
    return not times_us or max(times_us) < COMPARABLE * min(times_us)


def time_text(time_us: float) -> str:
    """Return a time in us or ms."""
    return f"{time_us:.1f} us" if time_us < MANY_US else f"{time_us / 1e3:.1f} ms"


def _bar(spans: list[TimelineSpan], total_us: float, width: int) -> Text:
    """Return a row of cells, each with the kind that fills most of it. A lone chunk outside of kernels gets a cell even
    if it is shorter."""
    cells: list[dict[SpanKind, float]] = [{} for _ in range(width)]
    cell_us = total_us / width if total_us else 1.0
    is_alone = len({span.track for span in spans}) == 1
    for span in spans:
        first, last = int(span.begin_us / cell_us), int(span.end_us / cell_us)
        for cell in range(first, min(last, width - 1) + 1):
            covered = min(span.end_us, (cell + 1) * cell_us) - max(span.begin_us, cell * cell_us)
            cells[cell][span.kind] = cells[cell].get(span.kind, 0.0) + covered
        if is_alone and span.kind in COMMUNICATION and first < width:
            cells[first][span.kind] = cell_us
    bar = Text()
    for covers in cells:
        kind = max((kind for kind in KINDS if kind in covers), key=lambda kind: covers[kind], default=None)
        if kind is None or covers[kind] < _LEAST_SHARE * cell_us:
            bar.append(" ")
        else:
            bar.append(GLYPHS[kind], style=COLOURS[kind])
    return bar


def _legend(kinds: Iterable[SpanKind]) -> Text:
    """Return the glyphs of the kinds that occur."""
    seen = set(kinds)
    legend = Text()
    for kind in KINDS:
        if kind in seen:
            legend.append(GLYPHS[kind], style=COLOURS[kind])
            legend.append(f" {kind}  ")
    return legend


def _label(key: tuple[int, str]) -> str:
    return f"rank {key[0]} {key[1]}"
