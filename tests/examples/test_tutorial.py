"""The tutorial's files, as they stand there, print what it says. Each runs in a process of its own."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from overweave.ops.author.compile import compile
from tests import forked
from tests.source_tree import ROOT, python_path

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
FILES = dict(re.findall(r"^`(\w+\.py)`\n\n```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
SAID = r"^`(\w+\.py)`\n\n```python\n(?:(?!```).)*```\n(?:(?!^`\w).)*?```text\n(.*?)```"
PRINTED = dict(re.findall(SAID, PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = {
    "alone.py": [],
    "fused.py": [],
    "choose.py": [],
    "measure.py": ["-m", "tests.scripts", "2"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_file_is_run_here():
    assert set(FILES) == {"linear.py", *COMMANDS}
    assert set(PRINTED) == set(COMMANDS)


@pytest.mark.slow
def test_the_kernel_is_annotated_and_knows_nothing_of_us(folder: Path):
    assert "import overweave" not in FILES["linear.py"]
    assert "wait_for_tile" in compile(f"{folder}/linear.py:linear_kernel", {"X": "all_gather.push"}).source()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_it_prints_what_the_page_says(folder: Path, name: str):
    environment = {**os.environ, "PYTHONPATH": python_path(folder), "OVERWEAVE_CACHE_DIR": str(folder / "cache")}
    ran = forked.run(*COMMANDS[name], name, timeout=200, env=environment, cwd=folder)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.endswith(PRINTED[name]), ran.stdout
    if name != "measure.py":
        assert ran.stdout == PRINTED[name]
