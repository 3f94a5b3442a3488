"""The progress bar: in a terminal it says what is under way and how long the rest takes; elsewhere nothing."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys

import pytest

from overweave.cli.progress import progress
from tests.source_tree import python_path

CODE = """
import time
from overweave.cli.progress import progress
with progress("bench", 4) as tell:
    for done in range(4):
        tell(f"case {done}", done)
        print("result", done)
        time.sleep(0.15)
"""


def test_nothing_is_drawn_where_no_terminal_is(capsys: pytest.CaptureFixture[str]):
    with progress("bench", 2) as tell:
        tell("case 0", 0.5)
        print("result")
    drawn = capsys.readouterr()
    assert (drawn.out, drawn.err) == ("result\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 120])
def test_a_terminal_shows_what_is_under_way_and_results_go_where_they_were_sent(columns: int):
    master, slave = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": python_path(), "TERM": "xterm", "COLUMNS": str(columns)}
    with subprocess.Popen(
        [sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=slave, env=environment, text=True
    ) as started:
        os.close(slave)
        drawn = b""
        with contextlib.suppress(OSError):  # what a terminal raises when nobody has it any more
            while part := os.read(master, 1 << 16):
                drawn += part
        out = started.stdout.read() if started.stdout else ""
    os.close(master)
    assert started.returncode == 0
    assert out.splitlines() == [f"result {number}" for number in range(4)]
    text = drawn.decode()
    if columns >= 100:
        assert "bench case 3" in text
        assert "3 of 4" in text
        assert "left" in text


def test_of_ranks_one_draws():
    with progress("bench", 2, is_shown=False) as tell:
        tell("case 0", 1)
