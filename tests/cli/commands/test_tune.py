"""`overweave tune`: the ranks it starts, what it prints and what it keeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overweave.cli.commands import tune as command
from overweave.cli.main import app
from overweave.ir.problem import Problem
from overweave.tuner.measure.search import Tuned
from overweave.tuner.space.shapes import ShapeCase
from overweave.tuner.space.space import Candidate, candidate
from overweave.tuner.space.target import Target
from overweave.tuner.store.cache import Entry, Time, decode, fingerprint, path_of, save
from tests import forked

OWN = fingerprint(Target("cpu"), 2)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path / "cache"))


def tune(*words: str) -> subprocess.CompletedProcess[str]:
    return forked.run("-m", "overweave.cli.main", "tune", *words, timeout=240)


ONE, SEVERAL = ("60,32,16", "w"), ("128,32+16,16", "[w0, w1]")


@pytest.mark.slow
@pytest.mark.parametrize("tried", [(SEVERAL,), pytest.param((ONE, SEVERAL), marks=pytest.mark.nightly)])
def test_a_shape_is_tuned_printed_as_code_kept_and_added_to_a_table(tmp_path: Path, tried: tuple[tuple[str, str], ...]):
    table = tmp_path / "table.json"
    for shape, weights in tried:
        done = tune("all_gather_matmul", f"--shape={shape}", "-w", "2", "--device=cpu", f"--json={table}")
        assert done.returncode == 0, done.stderr
        assert f'ow.all_gather_matmul(x, {weights}, group, plan="' in done.stdout
        assert "library" in done.stdout
    kept, added = decode(path_of(OWN).read_bytes()), decode(table.read_bytes())
    assert kept == added
    found = [(entry.problem.m, entry.problem.n, entry.problem.columns) for entry in kept.entries]
    assert found == [(64, 16, ()), (128, 24, (16, 8))][-len(tried) :]


@pytest.mark.nightly
def test_ctrl_c_ends_every_rank_and_keeps_what_is_tuned(tmp_path: Path):
    """On four ranks, behind the first of two cases."""
    shapes, table = tmp_path / "shapes.json", tmp_path / "table.json"
    large = {"name": "large", "m": 4096, "n": 4096, "k": 4096}  # for which the test does not wait
    shapes.write_text(json.dumps({"cases": [{"name": "small", "m": 64, "n": 64, "k": 64}, large]}))
    line = [sys.executable, "-m", "overweave.cli.main", "tune", "all_gather_matmul", f"--shapes={shapes}", "-w", "4"]
    started = subprocess.Popen(
        [*line, "--device=cpu", "--dtype=fp32", f"--json={table}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ, start_new_session=True,
    )  # fmt: skip
    end_s = time.monotonic() + 120
    while not table.exists() and started.poll() is None and time.monotonic() < end_s:
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=60)  # every rank holds stderr: that it ends says that they are gone
    assert started.returncode == 128 + signal.SIGINT, err
    assert "tune is unfinished: the cases that are printed above are kept" in err
    assert "Traceback" not in err
    assert out.startswith("small: ")
    own = fingerprint(Target("cpu"), 4)
    assert decode(table.read_bytes()) == decode(path_of(own).read_bytes())
    assert [entry.problem.m for entry in decode(table.read_bytes()).entries] == [64]


@pytest.mark.slow
def test_a_rank_that_cannot_is_told_by_the_exit_code():
    assert tune("all_gather_matmul", "--shape=8,8,8", "-w", "9", "--device=cuda").returncode != 0


@pytest.mark.parametrize(
    "words",
    [
        ("matmul", "--shape=8,8,8"),
        ("all_gather_matmul", "--shape=8,8"),
        ("all_gather_matmul", "--shape=8,0,8"),
        ("all_gather_matmul", "--shape=8,-8,8"),
        ("all_gather_matmul", "--shape=8,8,2147483648"),
        ("all_gather_matmul", "--shapes=no_such_set"),
        ("all_gather_matmul", "--shape=8,8,8", "--dtype=int8"),
        ("all_gather_matmul", "--shape=8,8+,8"),
        ("matmul_reduce_scatter", "--shape=8,8+8,8"),
        ("all_gather_matmul", "--shape=8,8,8", "--after=tanh"),
        ("all_gather_matmul", "--shapes=mlp", "--after=silu"),
        ("all_gather_matmul", "--shape=64,96,64", "-w", "4", "--dtype=fp8"),
        ("all_gather_matmul", "--shape=64,48+80,64", "-w", "2", "--dtype=fp8"),
        ("matmul_all_reduce", "--shapes=mlp", "-w", "3", "--dtype=fp8"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "start_ranks", lambda words, world: pytest.fail("nothing may be started"))
    assert CliRunner().invoke(app, ["tune", *words, "--device=cpu"]).exit_code == 2


def test_what_it_tells(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    problem = Problem(operator="all_gather_matmul", m=64, n=16, k=16, world_size=2, dtype="bfloat16")
    times = (Time("push", {"pieces": 2}, 8.0), Time("sequential", {}, 12.0), Time("per_shard", {}, 16.0))
    tuned = Tuned(Entry(problem, times), Candidate("per_shard"), {"torch.fused": "RuntimeError: no"})
    command._report_case("a case", tuned, OWN, tmp_path / "table.json")
    told = capsys.readouterr().out
    assert "8.0 us, library 12.0 us, 1.50 times; the model's choice has 0.50 of its speed" in told
    assert 'ow.all_gather_matmul(x, w, group, plan="push pieces=2")' in told
    assert "left out: torch.fused: RuntimeError: no" in told
    assert decode((tmp_path / "table.json").read_bytes()).entries == (tuned.entry,)
    assert f"not kept: {path_of(OWN)}" in told
    save((tuned.entry,), OWN)
    command._report_case("a case", tuned, OWN, None)
    assert f"\n    kept in {path_of(OWN)}" in capsys.readouterr().out
    assert tuned.winner == candidate("push", {"pieces": 2})


@pytest.mark.parametrize(
    ("case", "operator", "pasted"),
    [
        (ShapeCase("a", 64, 64, 32, columns=(32, 16, 16)), "all_gather_matmul", '(x, [w0, w1, w2], group, plan="p")'),
        (
            ShapeCase("a", 64, 64, 32, after="gate+silu"),
            "all_gather_matmul",
            '(x, w, group, gate=gate, activation="silu", plan="p")',
        ),
        (
            ShapeCase("a", 64, 64, 32, after="residual+rms_norm"),
            "matmul_all_reduce",
            '(x, w, group, residual=residual, norm=ow.RmsNorm(norm_weight), plan="p")',
        ),
        (
            ShapeCase("a", 64, 64, 32, after="bias+gelu+residual"),
            "matmul_reduce_scatter",
            '(x, w, group, bias=bias, residual=residual, activation="gelu", plan="p")',
        ),
    ],
)
def test_what_is_pasted_has_all_that_was_tuned(case: ShapeCase, operator: str, pasted: str):
    assert command.code(case.problem(operator, 2, "bf16"), "p") == f"ow.{operator}{pasted}"


def test_what_is_pasted_for_fp8_passes_scales():
    problem = ShapeCase("a", 64, 64, 32).problem("all_gather_matmul", 2, "fp8")
    assert "scale_x=scale_x, scale_w=scale_w, plan=" in command.code(problem, "push")


def test_it_starts_its_ranks_with_the_same_words(monkeypatch: pytest.MonkeyPatch):
    started: list[object] = []
    monkeypatch.setattr(command, "start_ranks", lambda words, world: started.append((list(words), world)))
    monkeypatch.delenv("RANK", raising=False)
    done = CliRunner().invoke(app, ["tune", "all_gather_matmul", "--shapes=mlp", "-w", "3", "--device=cpu"])
    assert done.exit_code == 0, done.output
    words = ["tune", "all_gather_matmul", "--device=cpu", "--dtype=bf16", "--shapes=mlp"]
    assert started == [(words, 3)]


@pytest.mark.parametrize(("shape", "is_long"), [("64,64,64", False), ("8192,8192,8192", True)])
def test_shapes_that_take_hours_on_a_cpu_are_told(shape: str, is_long: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "start_ranks", lambda words, world: None)
    result = CliRunner().invoke(app, ["tune", "all_gather_matmul", f"--shape={shape}", "--device=cpu"])
    assert result.exit_code == 0
    assert ("take hours" in result.output) == is_long
