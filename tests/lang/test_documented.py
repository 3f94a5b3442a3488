"""The example of docs/primitives.md runs as it stands there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import forked
from tests.source_tree import ROOT, python_path


@pytest.mark.slow
def test_the_complete_example(tmp_path: Path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "primitives.md").read_text(), re.DOTALL)
    file = tmp_path / "example.py"
    file.write_text(code)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    result = forked.run(str(file), env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[True, True, True, True]\n"
