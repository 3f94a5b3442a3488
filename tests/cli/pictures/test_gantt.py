"""Timelines as text and as PNG."""

from __future__ import annotations

import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from overweave.cli.pictures.gantt import COLOURS, GLYPHS, print_gantt
from overweave.cli.pictures.png import save_png
from overweave.errors import InputError
from overweave.ir.timeline.timeline import KINDS, TimelineSpan, make_timeline

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
