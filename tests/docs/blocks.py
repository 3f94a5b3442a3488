"""The Python blocks of a page, each with what the page says that it prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.source_tree import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
# A block, and the text block behind it with only prose between: no other code.
BLOCK = re.compile(
    r"^```python\n(.*?)^```\n((?:(?!^```).)*?)(?:^```text\n(.*?)^```|(?=^```|\Z))", re.DOTALL | re.MULTILINE
)
WRITTEN_ELSEWHERE = {"tutorial.md", "primitives.md", "directives.md"}  # pages with tests of their own


class Block(NamedTuple):
    """A block of a page. prints: None where the page does not say."""

    page: Path
    number: int
    code: str
    prints: str | None

    @property
    def has_ranks(self) -> bool:
        """Whether torchrun starts it."""
        return "init_process_group" in self.code

    def __str__(self) -> str:
        return f"{self.page.stem}-{self.number}"


def blocks() -> list[Block]:
    """All of them, but those of pages that have tests of their own."""
    return [
        Block(page, number, found[1], found[3])
        for page in PAGES
        if page.name not in WRITTEN_ELSEWHERE
        for number, found in enumerate(BLOCK.finditer(page.read_text()))
    ]
