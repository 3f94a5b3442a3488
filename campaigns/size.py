"""How large the rooms are: lines, files and classes of each, of tests and of campaigns, beside another revision.

    python -m campaigns.size [--beside REVISION]

Judges nothing: a change that makes a room grow says so.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PRODUCT, JUDGES = "overweave", ("tests", "campaigns", "tools")


class Size(NamedTuple):
    """Of the Python files of a room."""

    lines: int = 0
    files: int = 0
    classes: int = 0

    def plus(self, text: str) -> Size:
        classes = sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(text)))
        return Size(self.lines + len(text.splitlines()), self.files + 1, self.classes + classes)


def here() -> Iterator[tuple[str, str]]:
    """The Python files of this checkout, each with its text."""
    for folder in (PRODUCT, *JUDGES):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def at(revision: str) -> Iterator[tuple[str, str]]:
    """The Python files of a revision, each with its text."""
    command = ["git", "-C", str(ROOT), "archive", revision]
    packed = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.name.endswith(".py") and member.name.split("/")[0] in (PRODUCT, *JUDGES):
                file = archive.extractfile(member)
                assert file is not None, f"{member.name} is a file"
                yield member.name, file.read().decode()


def sizes(files: Iterator[tuple[str, str]]) -> dict[str, Size]:
    """By room of the package, and by folder of judges."""
    found: dict[str, Size] = {}
    for name, text in files:
        top, below = name.split("/")[:2]
        room = top if top != PRODUCT else f"{PRODUCT}/{below.removesuffix('.py')}"
        for each in (room, "product" if top == PRODUCT else "judges"):
            found[each] = found.get(each, Size()).plus(text)
    return found


def table(now: dict[str, Size], before: dict[str, Size]) -> Iterator[str]:
    yield f"{'':24}{'lines':>8}{'files':>7}{'classes':>9}" + (f"{'before':>10}{'change':>8}" if before else "")
    for room in sorted({*now, *before}):
        size, old = now.get(room, Size()), before.get(room, Size())
        beside = f"{old.lines:10,}{size.lines - old.lines:+8,}" if before else ""
        yield f"{room:24}{size.lines:8,}{size.files:7,}{size.classes:9,}{beside}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", default="", help="A revision of this repository, such as the last release")
    revision = parser.parse_args().beside
    print(*table(sizes(here()), sizes(at(revision)) if revision else {}), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
