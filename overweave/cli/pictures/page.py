"""Timelines as one self-contained page for a browser. The only module that imports bokeh."""

from __future__ import annotations

from collections.abc import Sequence

from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d
from bokeh.models.renderers import DataRenderer
from bokeh.models.text import BaseText
from bokeh.models.widgets.markups import Div
from bokeh.plotting import figure
from bokeh.resources import INLINE

from overweave.cli.pictures.gantt import COLOURS, is_on_one_scale
from overweave.cli.pictures.lanes import Drawing, TableColumns, drawing_of
from overweave.ir.timeline.timeline import KINDS, WAIT, Timeline

_ROW_PIXELS, _HEAD_PIXELS, _LEAST_PIXELS = 17, 120, 220
_EXPOSED, _ARROW, _BAND, _WAITING = "#D55E00", "#444444", "#f3f5f8", "#c9ced6"
_HATCHES = {"collective": "x"}  # distinct without colour
MOST_ARROWS = 400  # more arrows are hidden at first: they would cover the bars
_TIPS = [
    ("", "@name, @kind"), ("where", "@place"), ("when", "@left{0,0.0} to @right{0,0.0}, @took{0,0.0} UNIT"),
    ("moves", "@moves"), ("writes", "@size"), ("waits for", "@waits_for"), ("waited for by", "@waited_for_by"),
]  # fmt: skip
_HOW = (
    "<b>{title}</b><br>One lane for each queue of each rank. Drag a box to look closer. Turn the wheel to zoom along"
    " time. Point at a bar to see what it moves and what it waits for; a line has a dot at the bar that waits. Click a"
    " word below a picture to hide or show it."
)


def page_of(title: str, timelines: Sequence[Timeline]) -> str:
    """Return the page, one picture per timeline, the first on top. All pan and zoom together if they are on one
    scale."""
    drawings = [drawing_of(timeline) for timeline in timelines]
    is_shared = is_on_one_scale(timelines) and len({drawing.unit for drawing in drawings}) == 1
    longest = max((drawing.total for drawing in drawings), default=0.0)
    shared = _range(longest)
    pictures = [_picture(each, shared if is_shared else _range(each.total)) for each in drawings]
    head = Div(text=_HOW.format(title=_escaped(title)), sizing_mode="stretch_width")
    return file_html(column(head, *pictures, sizing_mode="stretch_width"), INLINE, title=title)


def _range(total: float) -> Range1d:
    return Range1d(start=-0.01 * total, end=1.01 * (total or 1.0))


def _picture(drawing: Drawing, x_range: Range1d) -> figure:
    picture = figure(
        title=drawing.title,
        x_range=x_range,
        y_range=Range1d(start=drawing.height + 0.3, end=-0.3),
        height=max(_LEAST_PIXELS, int(_HEAD_PIXELS + _ROW_PIXELS * drawing.height)),
        sizing_mode="stretch_width",
        tools="box_zoom,xwheel_zoom,pan,reset,save",
        active_drag="box_zoom",
        active_scroll="xwheel_zoom",
        x_axis_label=drawing.unit,
    )
    middles = [(lane.top + lane.bottom) / 2 for lane in drawing.lanes]
    names: list[str | BaseText] = [f"rank {lane.rank} {lane.label}" for lane in drawing.lanes]
    picture.yaxis.ticker = FixedTicker(ticks=middles)
    picture.yaxis.major_label_overrides = dict[float | str, str | BaseText](zip(middles, names, strict=True))
    picture.ygrid.visible = False
    bands = ColumnDataSource({**drawing.ranks, "left": [0.0] * len(drawing.ranks["top"])})
    picture.quad(
        left="left", right=drawing.total, top="top", bottom="bottom", source=bands, color=_BAND, level="underlay"
    )
    if drawing.exposed.get("left"):
        picture.quad(
            left="left", right="right", top="top", bottom="bottom", source=ColumnDataSource(drawing.exposed),
            fill_color=_EXPOSED, fill_alpha=0.14, line_color=None, level="underlay",
            legend_label="exposed communication", name="exposed",
        )  # fmt: skip
    _draw_bars(picture, drawing)
    _draw_arrows(picture, drawing.arrows)
    picture.legend.click_policy = "hide"
    picture.legend.orientation = "horizontal"
    picture.add_layout(picture.legend[0], "below")
    return picture


def _draw_bars(picture: figure, drawing: Drawing) -> None:
    renderers: list[DataRenderer] = []
    for kind in sorted(drawing.bars, key=lambda kind: (kind != WAIT, KINDS.index(kind))):  # waits lie under the rest
        colour = _WAITING if kind == WAIT else COLOURS[kind]
        # An edge of the same colour keeps bars visible that are shorter than a pixel.
        bars = picture.quad(
            left="left", right="right", top="top", bottom="bottom", source=ColumnDataSource(drawing.bars[kind]),
            fill_color=colour, fill_alpha="alpha", line_color=colour, line_alpha="alpha", line_width=0.5,
            hatch_alpha=0.5, hatch_pattern=_HATCHES.get(kind, " "), legend_label=kind, name=kind,
        )  # fmt: skip
        renderers.append(bars)
    tips = [(name, text.replace("UNIT", drawing.unit)) for name, text in _TIPS]
    picture.add_tools(HoverTool(renderers=renderers, tooltips=tips, point_policy="follow_mouse"))


def _draw_arrows(picture: figure, arrows: TableColumns) -> None:
    """Draw the arrows; hidden at first if there are many."""
    if not arrows["x0"]:
        return
    source, is_drawn = ColumnDataSource(arrows), len(arrows["x0"]) <= MOST_ARROWS
    shafts = picture.segment(
        x0="x0", y0="y0", x1="x1", y1="y1", source=source, line_color=_ARROW, line_alpha=0.45, legend_label="waits for",
        visible=is_drawn, name="arrows",
    )  # fmt: skip
    picture.scatter(
        x="x1", y="y1", source=source, marker="circle", size=5, color=_ARROW, alpha=0.7, legend_label="waits for",
        visible=is_drawn,
    )  # fmt: skip
    picture.add_tools(HoverTool(renderers=[shafts], tooltips=[("", "@says")], line_policy="interp"))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
