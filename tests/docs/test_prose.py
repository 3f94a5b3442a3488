"""The README and the how-to pages are easy to read: short sentences, headings that say what the reader can do there."""

from __future__ import annotations

import re
from statistics import median

import pytest

from tests.source_tree import ROOT

README_WORDS, MEDIAN_WORDS, MOST_WORDS = 900, 20, 40
HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "quickstart.md", *HOW_TO]
CODE = re.compile(r"^```.*?^```$|^    .*?$|<!--.*?-->", re.DOTALL | re.MULTILINE)
LINK, ROW = re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), re.compile(r"^\|.*$", re.MULTILINE)
# A heading of a how-to page begins with a verb, or with what a reader asks.
VERBS = re.compile(
    r"^(Act|Add|Ask|Capture|Choose|Compare|Decode|Find|Go|Let|Load|Look|Measure|Name|Prove|Query|Read|Record|Run|See|Send|Sequence|Set|"
    r"Tune|Use|What|Write|All-reduce|fp8)\b"
)


def prose(text: str) -> str:
    """The text without code, tables and targets of links."""
    return LINK.sub(r"\1", ROW.sub("", CODE.sub("", text)))


def sentences(text: str) -> list[str]:
    """Of paragraphs, headings and items of lists."""
    parts = re.split(r"\n\s*\n|^#+ .*$|^- ", prose(text), flags=re.MULTILINE)
    found = [one for part in parts for one in re.split(r"(?<=[.?!:;])\s+", " ".join(part.split()))]
    return [one for one in found if len(one.split()) > 1]


def test_sentences_are_told_apart():
    text = (
        "# Head\n\nOne two three. Four [five](six)\nseven: eight nine!\n\n    code here. more\n\n| a. b |\n- ten eleven"
    )
    assert sentences(text) == ["One two three.", "Four five seven:", "eight nine!", "ten eleven"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_are_short(page):
    lengths = {one: len(one.split()) for one in sentences(page.read_text())}
    assert median(lengths.values()) <= MEDIAN_WORDS
    assert [one for one, length in lengths.items() if length > MOST_WORDS] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_headings_say_what_a_reader_can_do(page):
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    assert headings
    assert [heading for heading in headings if not VERBS.match(heading)] == []
