"""The layout of a timeline's page, as columns of numbers and text: lanes by rank and queue, bars, arrows, shades.

A queue that runs one thing at a time is one lane. Each program of a kernel is a thin lane of its own, within the
kernel's. Heights are in rows; row 0 is the top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

from overweave.cli.pictures.gantt import lane_order, spans_by_track
from overweave.ir.timeline.timeline import COMPUTE, Content, SpanKind, Timeline, TimelineSpan

TableColumns = dict[str, list[float | str]]
Row = tuple[float | str, ...]

ROW, BETWEEN, GAP = 1.0, 0.15, 0.7
PROGRAM, MOST_ROWS = 0.12, 8.0  # of a kernel: each program's row, and all of them together
SHADES = (1.0, 0.82)  # alternating, to separate adjacent bars
MOST_NAMED = 4  # operations in a tooltip that a bar waits for, or that wait for it
BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(frozen=True)
class DrawnLane:
    """The place of a rank's queue. programs: the tracks of its kernel that share it, from its top."""

    rank: int
    label: str
    top: float
    bottom: float
    programs: tuple[str, ...]

    def place(self, track: str) -> tuple[float, float]:
        """Return top and bottom of one program."""
        each = (self.bottom - self.top) / len(self.programs)
        top = self.top + each * self.programs.index(track)
        return top, top + each


@dataclass(frozen=True)
class Drawing:
    """The page's data of one timeline. bars: kind -> columns, the same for all kinds."""

    title: str
    unit: str
    height: float
    total: float
    lanes: tuple[DrawnLane, ...]
    bars: dict[SpanKind, TableColumns] = field(default_factory=dict)
    arrows: TableColumns = field(default_factory=dict)
    exposed: TableColumns = field(default_factory=dict)
    ranks: TableColumns = field(default_factory=dict)


def drawing_of(timeline: Timeline) -> Drawing:
    """Return the layout of a timeline."""
    lanes = tuple(_lanes(timeline))
    places = {(lane.rank, lane.label): (lane.top, lane.bottom) for lane in lanes}
    places |= {(lane.rank, track): lane.place(track) for lane in lanes for track in lane.programs}
    bands = {rank: (lanes_of_rank[0].top, lanes_of_rank[-1].bottom) for rank, lanes_of_rank in _by_rank(lanes).items()}
    return Drawing(
        title=_title(timeline),
        unit="steps" if timeline.source == "steps" else "us",
        height=max((lane.bottom for lane in lanes), default=ROW),
        total=timeline.total_us,
        lanes=lanes,
        bars=_bars(timeline, places),
        arrows=_arrows(timeline, places),
        exposed=_exposed(timeline, bands) if timeline.source != "steps" else {},
        ranks={"top": [top for top, _ in bands.values()], "bottom": [bottom for _, bottom in bands.values()]},
    )


def bytes_text(count: int) -> str:
    """Return bytes in a fitting unit; "" for none."""
    if count < 2:
        return "1 byte" if count else ""
    size, unit = next(((size, unit) for size, unit in BYTES if count >= size), (1, "bytes"))
    return f"{count / size:.4g} {unit}"


LaneHeights = Mapping[tuple[int, str], tuple[float, float]]


def _title(timeline: Timeline) -> str:
    """Return the picture's title: source, name, time and exposed communication."""
    if timeline.source == "steps":
        return f"{timeline.name}: {timeline.total_us:g} steps, each operation one step"
    hidden = f", {timeline.hidden_share():.1%} hidden"
    exposed = f", {timeline.exposed_us():.1f} us of communication exposed"
    return f"{timeline.source}: {timeline.name}, {timeline.total_us:.1f} us{exposed}{hidden}"


def _lanes(timeline: Timeline) -> list[DrawnLane]:
    """Return the lanes of all ranks from top to bottom."""
    next_top, lanes = 0.0, []
    tracks = spans_by_track(timeline)
    for rank in range(timeline.world_size):
        tracks_of_rank = {track: spans for (owner, track), spans in tracks.items() if owner == rank}
        for track, spans in sorted(tracks_of_rank.items(), key=lane_order):
            programs = tuple(sorted({span.track for span in spans} - {track}))
            rows = max(2 * ROW, min(MOST_ROWS, PROGRAM * len(programs))) if programs else ROW
            lanes.append(DrawnLane(rank, track, next_top, next_top + rows, programs))
            next_top += rows + BETWEEN
        next_top += GAP if tracks_of_rank else 0.0
    return lanes


def _by_rank(lanes: tuple[DrawnLane, ...]) -> dict[int, list[DrawnLane]]:
    return {rank: list(lanes_of_rank) for rank, lanes_of_rank in groupby(lanes, key=lambda lane: lane.rank)}


def _bars(timeline: Timeline, places: LaneHeights) -> dict[SpanKind, TableColumns]:
    tooltips, bars_of_lane = _Told(timeline), Counter[tuple[int, str]]()
    bars: dict[SpanKind, TableColumns] = {}
    for span in timeline.spans:
        lane = span.rank, span.track
        top, bottom = places[lane]
        bars_of_lane[lane] += 1
        row: dict[str, float | str] = {
            "left": span.begin_us, "right": span.end_us, "took": round(span.end_us - span.begin_us, 3), "top": top,
            "bottom": bottom, "alpha": SHADES[bars_of_lane[lane] % 2], "name": span.name, "kind": span.kind,
            "place": f"rank {span.rank}, {span.track}", **tooltips.of(span),
        }  # fmt: skip
        columns = bars.setdefault(span.kind, {key: [] for key in row})
        for key, value in row.items():
            columns[key].append(value)
    return bars


class _Told:
    """Tooltips of spans, by their operations."""

    def __init__(self, timeline: Timeline) -> None:
        self._contents = {content.operation: content for content in timeline.contents}
        names = [self._operation(span.name) for span in timeline.spans]
        self._before: dict[str, list[str]] = {}  # operation -> those it waits for
        self._after: dict[str, list[str]] = {}  # operation -> those that wait for it
        for arrow in timeline.arrows:
            source, target = names[arrow.source], names[arrow.target]
            self._before.setdefault(target, []).append(source)
            self._after.setdefault(source, []).append(target)

    def of(self, span: TimelineSpan) -> dict[str, str]:
        """Return column -> text of a span's tooltip."""
        name = self._operation(span.name)
        content = self._contents.get(name, Content(name, "", 0))
        return {
            "moves": content.regions,
            "size": bytes_text(content.written_bytes),
            "waits_for": _first_names(self._before.get(name, [])),
            "waited_for_by": _first_names(self._after.get(name, [])),
        }

    def _operation(self, name: str) -> str:
        """Return the operation of a span: a tile's name is the operation's and a number."""
        front = name.rpartition(".")[0]
        return front if name not in self._contents and front in self._contents else name


def _first_names(names: list[str]) -> str:
    """Return the first names, without duplicates, and how many more there are."""
    each = list(dict.fromkeys(names))
    more = f" and {len(each) - MOST_NAMED} more" if len(each) > MOST_NAMED else ""
    return ", ".join(each[:MOST_NAMED]) + more or "nothing"


def _arrows(timeline: Timeline, places: LaneHeights) -> TableColumns:
    """Return the columns of the arrows from notifying spans to waiting ones."""
    columns: TableColumns = {"x0": [], "y0": [], "x1": [], "y1": [], "says": []}
    for arrow in timeline.arrows:
        source, target = timeline.spans[arrow.source], timeline.spans[arrow.target]
        # A span of compute begins with its first tile, which may not be the one that waited: the arrow ends inside it.
        arrives = max(target.begin_us, min(source.end_us, target.end_us)) if target.kind == COMPUTE else target.begin_us
        (top, bottom), (low, high) = (places[each.rank, each.track] for each in (source, target))
        says = f"{target.name} waits for {source.name}"
        row: Row = (source.end_us, (top + bottom) / 2, arrives, (low + high) / 2, says)
        for key, value in zip(columns, row, strict=True):
            columns[key].append(value)
    return columns


def _exposed(timeline: Timeline, bands: Mapping[int, tuple[float, float]]) -> TableColumns:
    """Return the columns of the shades over exposed communication."""
    columns: TableColumns = {"left": [], "right": [], "top": [], "bottom": []}
    for rank, band in bands.items():
        for interval in timeline.exposed(rank):
            for key, value in zip(columns, (*interval, *band), strict=True):
                columns[key].append(value)
    return columns
