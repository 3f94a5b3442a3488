"""A campaign's loop: ctrl-C ends it behind the case under way, it tells what was found, and ends with 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from campaigns.shown import INTERRUPTED, shown
from tests.source_tree import python_path

CODE = """
import os, signal, sys
from campaigns.shown import shown
found = []
for number in shown(range(5), "cases", 5):
    if number == 2:
        for _ in range(int(sys.argv[1])):
            os.kill(os.getpid(), signal.SIGINT)
    found.append(number)
print("found", found)
"""


def run(interrupts: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE, str(interrupts)]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_every_item_is_given_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    assert list(shown("abc", "letters", 3)) == ["a", "b", "c"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_campaign_that_is_interrupted_tells_what_it_has():
    ended = run(1)
    assert ended.returncode == INTERRUPTED == 130
    assert ended.stdout == "UNFINISHED: cases ended by ctrl-C after 3 of 5\nfound [0, 1, 2]\n"
    assert "ctrl-C again ends at once" in ended.stderr


def test_a_second_ctrl_c_ends_it_at_once():
    ended = run(2)
    assert ended.returncode == INTERRUPTED
    assert "found" not in ended.stdout
    assert "Traceback" not in ended.stderr


def test_without_ctrl_c_it_ends_well():
    ended = run(0)
    assert (ended.returncode, ended.stdout) == (0, "found [0, 1, 2, 3, 4]\n")
