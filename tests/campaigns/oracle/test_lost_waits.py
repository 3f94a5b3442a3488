"""The campaign that deletes waits: none is missed, and one that were missed would be counted."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from campaigns.lint.authored_cases import AUTHORS
from campaigns.oracle import lost_waits

ONE = ["--world", "2", "--only", "matmul_kernel A=all_gather.push pieces=2"]


@pytest.mark.slow
@pytest.mark.parametrize("file", AUTHORS)
def test_without_any_one_wait_a_compiled_plan_is_refuted(file: str):
    author = AUTHORS[file]
    row = lost_waits.Tally(author.name, "")
    for way in author.exchanges[::3]:
        lost_waits.delete_all(lost_waits.small_plan(file, author, way, 2), row)
    assert row.waits
    assert row.missed == 0


@pytest.mark.nightly
def test_without_any_one_wait_every_compiled_plan_is_refuted(capsys: pytest.CaptureFixture[str]):
    assert lost_waits.main(["--no-ptx", "--world", "2"]) == 0
    printed = capsys.readouterr().out
    assert " 0 not missed; 0 cases to mend" in printed
    assert all(author.name in printed for author in AUTHORS.values())


@pytest.mark.slow
def test_the_ptx_holds_exactly_the_waits_of_the_text():
    author = AUTHORS["matmul"]
    row = lost_waits.Tally(author.name, "")
    with tempfile.TemporaryDirectory() as folder:
        row.counted, row.findings = lost_waits.count_compiled(
            Path(folder), "matmul", author, {"A": "all_gather.push pieces=2"}
        )
    assert row.counted == (1, 1)
    assert not row.is_bad


@pytest.mark.slow
def test_a_wait_that_nobody_missed_would_be_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(lost_waits, "is_proven", lambda plan: True)
    assert lost_waits.main(["--no-ptx", *ONE]) == 1
    assert " 0 not missed" not in capsys.readouterr().out


def test_a_wait_too_few_would_be_counted():
    assert lost_waits.Tally("k", "", counted=(2, 1)).is_bad
    assert not lost_waits.Tally("k", "", counted=(1, 1)).is_bad
    assert lost_waits.main(["--no-ptx", "--only", "nothing of the kind"]) == 1
