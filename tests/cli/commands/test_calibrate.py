"""`overweave calibrate`: what it refuses before anything is measured, and that an interrupted run leaves no file."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

pytest.importorskip("cuda.bindings")

from overweave.cli.commands import calibrate as command
from overweave.cli.main import app
from overweave.hardware.cards import Gpu, machine_for
from overweave.hardware.machine import load
from overweave.tuner.space.target import machine_of
from tests.cli.called import called
from tests.tuner.calibrate.test_machine_file import FOUND, SOURCE

GPU = Gpu("NVIDIA H200", (9, 0), FOUND.sms, 139.8, "nvswitch")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


run = partial(called, "calibrate")


def as_a_rank(monkeypatch: pytest.MonkeyPatch, calibrated: object) -> None:
    monkeypatch.setattr(command, "is_one_of_the_ranks", lambda: True)
    monkeypatch.setattr(command, "join_world", lambda device: nullcontext(SimpleNamespace(rank=0, world_size=1)))
    monkeypatch.setattr(command, "measure_machine", calibrated)
    monkeypatch.setattr(command, "current_gpu", lambda: GPU)


def test_a_file_is_written_whole_and_what_it_takes_from_elsewhere_is_said(tmp_path: Path, monkeypatch):
    as_a_rank(monkeypatch, lambda like, tell: (FOUND, SOURCE))
    out = tmp_path / "mine.json"
    assert "not measured, and taken from h200x4: topology, links, collectives" in run(str(out), "--links", "h200x4")
    assert load(str(out)).hbm.source == SOURCE


def test_without_a_file_it_is_kept_where_calls_find_it(monkeypatch: pytest.MonkeyPatch):
    as_a_rank(monkeypatch, lambda like, tell: (FOUND, SOURCE))
    assert machine_of(GPU).basis == "nearest"  # of 114 SMs
    run("--links", "h200x4")
    found = machine_of(GPU)
    assert (found.basis, found.doubt, machine_for(found, 2).hbm.source) == ("calibrated", 1.0, SOURCE)


def test_an_interrupted_calibration_leaves_no_file(tmp_path: Path, monkeypatch):
    def interrupted(like: object, tell: object) -> None:
        raise KeyboardInterrupt

    as_a_rank(monkeypatch, interrupted)
    out = tmp_path / "mine.json"
    assert CliRunner().invoke(app, ["calibrate", str(out)]).exit_code != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("mine.txt",), 2, "a machine file ends in .json"),
        (("mine.json", "--links", "abacus"), 2, "abacus"),
        (("/no/such/folder/mine.json",), 2, "write"),
        (("mine.json",), 1, "was built without CUDA"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...], code: int, reason: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "device_count", lambda: 0)
    assert reason in run(*words, exit_code=code)
    assert list(tmp_path.iterdir()) == []
