"""docs/tables.md is what the result files say, and is written from them alone."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from matplotlib.image import imread
from numpy import unique

from benchmarks import tables_page
from benchmarks.tables_page import COMMANDS, PAGE, REMARKS, _gpus, page, picture_of, sources
from campaigns.tables.table_pictures import DRAWN
from campaigns.tables.table_rows import COMPILED, PORTABLE, TABLES, TORCH, Row, write


def test_the_page_is_what_the_files_say():
    assert PAGE.read_text() == page(), "run python -m benchmarks.tables_page"


def test_pictures_are_drawn_of_every_table_that_has_one():
    missing = [str(picture_of(one)) for one in sources() if one.table in DRAWN and not picture_of(one).is_file()]
    assert missing == [], "run python -m benchmarks.tables_page --pictures"


def test_every_table_is_measured_and_says_where_and_how():
    assert {one.table for one in sources()} == set(TABLES)
    head = page().split("## ")[0]
    for one in sources():
        module = re.search(r"-m (campaigns\.\w+)", COMMANDS[one.table])
        assert module is not None
        assert importlib.util.find_spec(module[1]) is not None
        assert COMMANDS[one.table].format(_gpus(one.machine)) in head
    assert set(REMARKS) <= {one.file for one in sources()}, "a remark on a file that is told no more"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tables_page, "RESULTS", tmp_path)
    monkeypatch.setattr(tables_page, "PICTURES", tmp_path)
    return tmp_path


def against(us: float) -> list[Row]:
    times = {COMPILED: us, PORTABLE: 100.0, TORCH: 120.0}
    return [
        Row("against", "op", "8x8x8", series, "MLP-1", f"how {series}", us, us, 1.0) for series, us in times.items()
    ]


def test_without_files_nothing_is_claimed(results: Path):
    assert "No table has been measured yet" in page()


def test_the_latest_file_of_a_table_counts(results: Path):
    write(results / "compiled_tables.h200x2.2026-01-02.csv", against(101.0))
    write(results / "compiled_tables.h200x2.2026-01-01.csv", against(90.0))
    text = page()
    assert "| compiled | 101.0 |" in text
    assert "90.0" not in text
    assert "- PASS  op: compiled within 1.03 of portable, geometric mean: 1.010" in text
    assert "- op, MLP-1, compiled: `how compiled`" in text


@pytest.mark.slow
def test_pictures_are_drawn(results: Path):
    write(results / "compiled_tables.h200x2.2026-01-02.csv", against(101.0))
    tables_page.draw()
    (picture,) = results.glob("*.png")
    assert picture.name == "tables.against.h200x2.png"
    pixels = imread(picture)
    assert min(pixels.shape[:2]) > 100
    assert len(unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50, "text and bars have many shades"
