"""`overweave characterize`: tables, a CSV file and pictures on paper; what one GPU cannot measure is said."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import pytest

from overweave.tuner.model.overlap_losses import BESIDE, MATMULS, TRANSFER
from tests.cli.called import called

SHAPES = """{"cases": [
 {"name": "tall", "m": 65536, "n": 8192, "k": 4096},
 {"name": "deep", "m": 4096, "n": 8192, "k": 65536}
]}"""


run = partial(called, "characterize")


@pytest.mark.slow
def test_a_machine_on_paper_is_told_with_its_trends_and_files(tmp_path: Path):
    shapes, out = tmp_path / "shapes.json", tmp_path / "out"
    shapes.write_text(SHAPES)
    shown = run("--simulate", "mi300x8", "--shapes", str(shapes), "--out", str(out))
    assert "predicted on 8 x AMD Instinct MI300X" in shown
    assert "correlation with op-to-byte" in shown
    assert "or columns where m >= k: nowhere" in shown
    with (out / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["case"] for row in rows] == ["tall", "deep"]
    assert {*rows[0]} >= {*MATMULS, TRANSFER, *BESIDE}
    assert float(rows[1]["rows / W W"]) > float(rows[1]["columns / W W"]) > 1
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "losses.png").read_bytes()) > 20_000


def test_one_kind_of_loss_alone():
    shown = run("--simulate", "h200x8", "--only", "comm")
    assert TRANSFER in shown
    assert MATMULS[0] not in shown


def test_where_gpus_do_not_reach_each_other_nothing_is_told_of_copies(tmp_path: Path):
    shapes, out = tmp_path / "shapes.json", tmp_path / "out"
    shapes.write_text(SHAPES)
    run("--simulate", "rtx4090x4", "--world", "4", "--only", "cil", "--shapes", str(shapes), "--out", str(out))
    with (out / "losses.csv").open() as file:
        named = {*next(csv.DictReader(file))}
    assert {*BESIDE} & named == {"matmul beside the library", "the library beside matmul"}


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ((), 1, "torch sees no GPU here"),
        (("--simulate", "abacus"), 2, "abacus"),
        (("--simulate", "h200x4"), 2, "8 ranks on 4 GPUs"),
        (("--simulate", "rtx4090x4", "--world", "4", "--only", "comm"), 2, "do not reach each other's memory"),
        (("--simulate", "h200x8", "--shapes", "no.such"), 2, "no.such"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...], code: int, reason: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert reason in run(*words, exit_code=code)
