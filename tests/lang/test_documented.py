"""The example of docs/primitives.md runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT, python_path


@pytest.mark.slow
def test_the_complete_example(tmp_path: Path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "primitives.md").read_text(), re.DOTALL)
    file = tmp_path / "example.py"
    file.write_text(code)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[True, True, True, True]\n"
