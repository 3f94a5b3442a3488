"""A short version of the campaign: every crafted file of a few KiB, and a handful of fuzzed ones."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest

from campaigns.hostile import hostile_files, others

SMALL_BYTES = 16 << 10
# One of each kind that costs more than it is long, in a process of its own.
COSTLY = ("a million empty lists", "regions across each other", "an engine for each operation", "a text of words")
COSTLY += ("every two GPUs many times", "a trace of many tracks")


@pytest.mark.slow
def test_small_files_end_as_promised(tmp_path: Path):
    """Every sixth one, by one command, by turns: `campaigns.hostile_files` has all of them by all at night."""
    faults = {}
    for kind, named in hostile_files.ALL_CRAFTED.items():
        small = {name: data for name, make in named.items() if len(data := make()) < SMALL_BYTES}
        assert len(small) >= 2
        for (name, data), words in zip(list(small.items())[::6], cycle(hostile_files.COMMANDS[kind]), strict=False):
            file = hostile_files._placed(kind, data, tmp_path)
            faults[name, words] = hostile_files.among_others(words, name, file, tmp_path).faults
    assert {name: found for name, found in faults.items() if found} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*COSTLY[1::2], *(pytest.param(each, marks=pytest.mark.nightly) for each in COSTLY[::2])]
)
def test_costly_files_end_as_promised(name: str, tmp_path: Path):
    kind = next(kind for kind, named in hostile_files.ALL_CRAFTED.items() if name in named)
    ended = hostile_files.by_itself(tmp_path, kind, hostile_files.COMMANDS[kind][0], name)
    assert ended.peak_bytes > 0
    assert ended.faults == []


@pytest.mark.slow
@pytest.mark.parametrize("words", hostile_files.COMMANDS[others.MACHINE][2:], ids=str)
def test_every_command_reads_a_machine_within_the_limits(words: tuple[str, ...], tmp_path: Path):
    name = "every two GPUs many times"
    data = hostile_files.ALL_CRAFTED[others.MACHINE][name]()
    file = hostile_files._placed(others.MACHINE, data, tmp_path)
    assert hostile_files.among_others(words, name, file, tmp_path).faults == []


@pytest.mark.slow
def test_fuzzed_files_end_as_promised():
    ended = hostile_files.batch(hostile_files.known_files(), range(100))
    assert {each.file: each.faults for each in ended if each.faults} == {}
    assert {each.exit_code for each in ended} >= {0, 2}
    assert sum(each.exit_code != 2 for each in ended) > len(ended) / 5


def test_the_judge_sees_what_is_not_kept():
    ended = hostile_files.Ended("verify {} --json", "one", 0, -11, 3.0, 2 << 30, "proven", "Traceback ...\nKeyError: 1")
    assert [fault.split(":")[0] for fault in ended.faults] == [
        "exit code -11",
        "3.0 s",
        "2048 MiB",
        "a traceback",
        "no JSON",
    ]
