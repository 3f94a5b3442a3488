"""The page of `--html`: one file that holds all it needs, or one line that says why there is none."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from overweave.cli.output_file import page_writer
from overweave.errors import InputError, MachineError
from overweave.ir.timeline.timeline import Content, TimelineSpan, make_timeline
from tests.cli.pictures.test_lanes import CALL


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
