"""What a campaign says of a promise."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """A promise, what was found, and whether it holds; None: told only."""

    promise: str
    found: str
    holds: bool | None

    def __str__(self) -> str:
        word = "told" if self.holds is None else "PASS" if self.holds else "FAIL"
        return f"{word}  {self.promise}: {self.found}"
