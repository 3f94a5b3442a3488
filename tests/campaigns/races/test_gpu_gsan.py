"""The programs that a race detector is tried with: right ones are right, each race changes what it says it changes."""

from __future__ import annotations

import os

import pytest

from campaigns.races.gpu_gsan import Outcome, judged, programs, tell
from campaigns.races.programs import COPY_FILE, RACES, RIGHT, Change, changed_text
from tests import forked

RACE = "{0}/copy.py:76: : block: [2,0,0], thread: [0,0,0] Assertion `Read after write race detected` failed."
RIGHT_SAID = "rank {0}: nothing is wrong, 0 of 2 launches have void waits"


@pytest.mark.slow
def test_right_programs_are_right_and_changes_fit_their_files():
    said = forked.run("-m", "campaigns.gpu_gsan", "--dry", env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=200)
    assert said.returncode == 0, said.stderr[-2000:]
    lines = said.stdout.splitlines()
    assert [line.split()[-1] for line in lines[: len(RIGHT)]] == ["right"] * len(RIGHT)
    assert len(lines) == len(RIGHT) + len(RACES)


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.name)
def test_a_race_is_a_change_of_a_table_of_a_text_or_of_the_mover(race):
    program = RIGHT[race.program]()
    assert race.table(program) != program or race.changes


def test_a_change_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="0 times"):
        changed_text(COPY_FILE, [Change(COPY_FILE, "no such text", "")])


def test_what_ranks_print_is_judged():
    race = next(each for each in programs() if each.name)
    right = [RIGHT_SAID.format(rank) for rank in (0, 1)]
    assert judged(race, right, 1.0)[1:3] == ("", "")
    seen = judged(race, [right[0], RACE.format("/tmp")], 1.0)
    assert seen.report == "Read after write race detected at copy.py:76, rank 1"
    assert "void" in judged(race, [right[0], right[1].replace("0 of", "1 of")], 1.0).trouble


def test_a_blind_detector_and_one_that_sees_ghosts_fail(capsys):
    right = [Outcome(each) for each in programs() if not each.name]
    blind = [Outcome(each) for each in RACES]
    seen = [Outcome(each, "Read after write" if each.is_seen else "") for each in RACES]
    assert tell(right + seen) == 0
    assert tell(right + blind) == 1
    assert tell([right[0]._replace(report="Read after write"), *right[1:], *seen]) == 1
