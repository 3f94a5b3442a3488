"""Pictures of timelines: the page of --html and its lanes, text and PNG."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console

from overweave.cli.output_file import page_writer
from overweave.cli.pictures.gantt import COLOURS, GLYPHS, print_gantt
from overweave.cli.pictures.lanes import MOST_NAMED, TableColumns, bytes_text, drawing_of
from overweave.cli.pictures.png import save_png
from overweave.errors import InputError, MachineError
from overweave.ir.problem import Problem
from overweave.ir.timeline.operations import timeline_of_steps, with_contents
from overweave.ir.timeline.timeline import KINDS, Arrow, Content, TimelineSpan, make_timeline
from overweave.schedules.catalog.catalog import build

# The page of `--html`: one file that holds all it needs, or one line that says why there is none.


class Fetched(HTMLParser):
    """Collects the addresses of scripts, styles and pictures that a browser would fetch for a page, and its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name == "src" or (tag, name) == ("link", "href")]


@pytest.mark.slow
def test_a_page_needs_no_other_file(tmp_path: Path):
    file = tmp_path / "call.html"
    page_writer(file)("a <call>", CALL, CALL)
    text = file.read_text()
    assert Fetched(text).addresses == []
    assert Fetched('<script src="a.js"></script><link href="b.css">').addresses == ["a.js", "b.css"]
    assert "a &lt;call&gt;" in text
    for word in ("x@1[0:8,0:4] to x@0[8:16,0:4]", "rank 0 tiles", "exposed communication", "product.1 waits for push"):
        assert word in text, word


@pytest.mark.slow
def test_names_of_a_file_that_nobody_vouches_for_stay_names(tmp_path: Path):
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    span = TimelineSpan(0, bad, bad, "copy", 0, 1)
    hostile = make_timeline(bad, "measured", 1, [span], contents=[Content(bad, bad, 1)])
    plain = make_timeline("call", "measured", 1, [TimelineSpan(0, "copies", "push", "copy", 0, 1)])
    tags = []
    for number, (title, timeline) in enumerate(((bad, hostile), ("call", plain))):
        file = tmp_path / f"{number}.html"
        page_writer(file)(title, timeline)
        tags.append(Fetched(file.read_text()).tags)
    assert tags[0] == tags[1]


def test_a_missing_package_is_one_line_that_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "overweave.cli.pictures.page", raising=False)
    monkeypatch.setitem(sys.modules, "bokeh", None)
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    with pytest.raises(MachineError, match=r"bokeh is not installed\. pip install 'bokeh>=3\.6'\.$"):
        page_writer(tmp_path / "call.html")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_told_before_the_work(tmp_path: Path):
    with pytest.raises(InputError, match="Name a file that can be written"):
        page_writer(tmp_path / "no" / "call.html")


def test_no_file_is_asked_for_and_none_is_written(tmp_path: Path):
    page_writer(None)("nothing", CALL)
    assert list(tmp_path.iterdir()) == []


# What a page shows of a timeline: where bars lie, what they say, what is shaded, and which bars arrows join.

CALL = make_timeline(
    "call",
    "measured",
    2,
    [
        TimelineSpan(0, "tiles", "begin", "begin", 0, 1),
        TimelineSpan(0, "tiles.000", "product.0", "compute", 1, 40),
        TimelineSpan(0, "tiles.001", "product.1", "wait", 1, 8),
        TimelineSpan(0, "tiles.001", "product.1", "compute", 8, 40),
        TimelineSpan(1, "copies", "push", "copy", 0, 8),
    ],
    [Arrow(4, 3)],
    [Content("push", "x@1[0:8,0:4] to x@0[8:16,0:4]", 2048), Content("product", "x, w to y", 64)],
)


def rows(columns: TableColumns) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def test_each_queue_has_a_lane_and_each_program_a_part_of_it():
    drawing = drawing_of(CALL)
    assert [(lane.rank, lane.label) for lane in drawing.lanes] == [(0, "tiles"), (1, "copies")]
    tiles, copies = drawing.lanes
    assert tiles.bottom < copies.top
    first, second = rows(drawing.bars["compute"])
    assert (first["top"], second["bottom"]) == (tiles.top, tiles.bottom)
    assert first["bottom"] == second["top"]
    (begin,) = rows(drawing.bars["begin"])
    assert (begin["top"], begin["bottom"]) == (tiles.top, tiles.bottom)


def test_bars_say_what_moves_how_much_and_who_waits_for_whom():
    bars = drawing_of(CALL).bars
    (push,) = rows(bars["copy"])
    assert (push["left"], push["right"], push["took"]) == (0, 8, 8)
    assert (push["moves"], push["size"]) == ("x@1[0:8,0:4] to x@0[8:16,0:4]", "2 KiB")
    assert (push["waits_for"], push["waited_for_by"]) == ("nothing", "product")
    tile = rows(bars["compute"])[1]
    assert (tile["name"], tile["moves"], tile["waits_for"]) == ("product.1", "x, w to y", "push")
    assert tile["place"] == "rank 0, tiles.001"


def test_an_arrow_leads_from_the_end_of_what_signals_to_what_waits():
    drawing = drawing_of(CALL)
    (arrow,) = rows(drawing.arrows)
    assert (arrow["x0"], arrow["x1"], arrow["says"]) == (8, 8, "product.1 waits for push")
    assert drawing.lanes[1].top < arrow["y0"] < drawing.lanes[1].bottom
    assert drawing.lanes[0].top < arrow["y1"] < drawing.lanes[0].bottom


def test_exposed_communication_is_shaded_over_its_rank():
    drawing = drawing_of(CALL)
    (shade,) = rows(drawing.exposed)
    assert (shade["left"], shade["right"]) == (0, 8)
    assert (shade["top"], shade["bottom"]) == (drawing.lanes[1].top, drawing.lanes[1].bottom)
    assert "8.0 us of communication exposed" in drawing.title


def test_long_lists_are_cut_and_empty_timelines_are_drawn():
    spans = [TimelineSpan(0, "copies", f"c{number}", "copy", number, number + 1) for number in range(8)]
    many = make_timeline("many", "simulated", 1, spans, [Arrow(number, 7) for number in range(7)])
    assert rows(drawing_of(many).bars["copy"])[7]["waits_for"] == f"c0, c1, c2, c3 and {7 - MOST_NAMED} more"
    assert drawing_of(make_timeline("empty", "simulated", 1, [])).bars == {}


def test_steps_are_counted_and_leave_nothing_exposed():
    problem = Problem(operator="all_gather_matmul", m=256, n=256, k=64, world_size=2, dtype="bfloat16")
    plan = build("all_gather_matmul.push", problem, {"pieces": 1})
    steps = with_contents(timeline_of_steps(plan.schedule), plan.schedule, plan.realization.dtype)
    drawing = drawing_of(steps)
    assert (drawing.unit, drawing.exposed) == ("steps", {})
    assert drawing.title == "all_gather_matmul.push: 2 steps, each operation one step"
    (copy, _) = rows(drawing.bars["copy"])
    assert "x@0[0:128,0:64] to gathered@1[0:128,0:64]" in copy["moves"]
    assert copy["size"] == "16 KiB"


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "1 byte"), (3, "3 bytes"), (1536, "1.5 KiB"), (2**33, "8 GiB")]
)
def test_bytes_have_a_unit(count: int, text: str):
    assert bytes_text(count) == text


# Timelines as text and as PNG.

MEASURED = make_timeline(
    "call",
    "measured",
    2,
    [
        TimelineSpan(0, "tiles.000", "a", "compute", 0, 40),
        TimelineSpan(0, "tiles.001", "a", "wait", 0, 8),
        TimelineSpan(0, "tiles.001", "a", "compute", 8, 40),
        TimelineSpan(1, "copies", "p", "copy", 20, 100),
    ],
)


def drawn(*timelines) -> list[str]:
    console = Console(file=StringIO(), width=40, color_system=None)
    print_gantt(console, *timelines)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def test_time_runs_from_left_to_right_on_one_scale():
    lines = drawn(MEASURED, make_timeline("call", "simulated", 1, [TimelineSpan(0, "copies", "p", "copy", 0, 40)]))
    rows = {line[:13].strip() + str(number): line[14:] for number, line in enumerate(lines)}
    assert lines[0] == "measured: call, 100.0 us"
    width = 40 - len("rank 0 copies") - 2  # 25 cells of 4 us
    assert rows["rank 0 tiles1"].rstrip() == "█" * 10
    assert rows["rank 1 copies2"].rstrip() == " " * 5 + "▓" * (width - 5)
    assert len(rows["rank 0 copies4"].rstrip()) == 10
    assert lines[-1].split() == ["█", "compute", "▓", "copy", "·", "wait"]


def test_kinds_differ_in_glyph_and_colour():
    assert len(set(COLOURS.values())) == len(set(GLYPHS.values())) == len(KINDS)


def test_nothing_to_draw_is_drawn():
    assert drawn(make_timeline("empty", "measured", 1, []))[0] == "measured: empty, 0.0 us"


def share_of(picture: Path, colour: str) -> float:
    """The share of a picture's pixels that have a colour."""
    pixels = (imread(picture)[..., :3] * 255).round().astype(int)
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return float((pixels == wanted).all(axis=-1).mean())


@pytest.mark.slow
def test_png(tmp_path: Path):
    """The bars of a kind cover more of the picture than its place in the legend does."""
    save_png(tmp_path / "t.png", MEASURED, MEASURED)
    assert share_of(tmp_path / "t.png", COLOURS["compute"]) > 0.01
    assert share_of(tmp_path / "t.png", COLOURS["copy"]) > 0.01
    with pytest.raises(InputError):
        save_png(tmp_path / "no" / "t.png", MEASURED)
    with pytest.raises(InputError):
        save_png(tmp_path / "t.png")


@pytest.mark.slow
def test_the_simulate_command_needs_neither_torch_nor_matplotlib():
    modules = "overweave.cli.main, overweave.cli.commands.simulate"
    code = f"import sys, {modules}; print({{'torch', 'matplotlib'}} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"
