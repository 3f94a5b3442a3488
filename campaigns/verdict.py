"""What a campaign says of a promise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Verdict(NamedTuple):
    """A promise, what was found, and whether it holds; None: told only."""

    promise: str
    found: str
    holds: bool | None

    def __str__(self) -> str:
        word = "told" if self.holds is None else "PASS" if self.holds else "FAIL"
        return f"{word}  {self.promise}: {self.found}"


def tell(verdicts: Iterable[Verdict], is_quiet: bool = False) -> int:
    """Prints a line for each verdict; the exit code: 1 if a promise is broken."""
    found = list(verdicts)
    if not is_quiet:
        print(*found, sep="\n", flush=True)
    return int(any(verdict.holds is False for verdict in found))
