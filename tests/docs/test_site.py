"""The documentation builds strictly, and its generated pages say what the code says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from docs.writers.commands import commands_page
from overweave.cli.main import COMMANDS
from overweave.schedules.methods.registry import METHODS
from tests.source_tree import ROOT


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "GALLERY_DRAWN": "one"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    pages = {path.name for path in (tmp_path / "site" / "gallery").iterdir()}
    assert pages >= set(METHODS)
    assert (tmp_path / "site" / "reference" / "commands" / "index.html").exists()


@pytest.mark.slow
def test_every_command_has_its_options():
    page = commands_page()
    assert all(f"## overweave {name}\n" in page for name in COMMANDS)
    assert "| `--dtype` | `bf16` |" in page
