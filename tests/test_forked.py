"""A forked program ends, prints and fails as one that is started does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("last", "code", "told"),
    [("", 0, ""), ("sys.exit(3)", 3, ""), ("sys.exit('no')", 1, "no\n"), ("os.kill(os.getpid(), 9)", -9, "")],
)
def test_how_it_ends(last: str, code: int, told: str, tmp_path: Path):
    script = tmp_path / "it.py"
    script.write_text(f"import os, sys\nprint(sys.argv[1], flush=True)\n{last}\n")
    done = forked.run(str(script), "word")
    assert (done.returncode, done.stdout, done.stderr) == (code, "word\n", told)


def test_an_error_and_a_program_that_takes_too_long_are_told(tmp_path: Path):
    script = tmp_path / "it.py"
    script.write_text("raise KeyError('lost')\n")
    done = forked.run(str(script))
    assert done.returncode == 1
    assert "KeyError: 'lost'" in done.stderr
    script.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run(str(script), timeout=1)
