"""With which versions of Triton and of PyTorch overweave is tested. Nothing else in the library asks for a version."""

from __future__ import annotations

import re
from typing import Literal

# The oldest and the newest version that tests run with: `python -m campaigns.versions` prints which of them.
TESTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {"torch": ((2, 10), (2, 15)), "triton": ((3, 6), (3, 9))}


def numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version: (2, 15) of `2.15.0+cu132`."""
    found = [int(each) for each in re.findall(r"\d+", version.split("+")[0])[:2]]
    return (*found, 0, 0)[:2]  # type: ignore[return-value]


def standing(package: str, version: str) -> Literal["old", "tested", "new"]:
    """Whether a version is one that tests run with, or older or newer than all of them."""
    oldest, newest = TESTED[package]
    return "old" if numbers(version) < oldest else "new" if numbers(version) > newest else "tested"


def tested(package: str) -> str:
    """The versions that tests run with, as a sentence has them: `3.6 to 3.9`."""
    return " to ".join(f"{major}.{minor}" for major, minor in TESTED[package])
