"""`overweave trace`: any schedule of the catalog, on emulated ranks, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overweave.cli.main import app
from overweave.cli.trace import problem_of_shape
from overweave.ir.trace import from_chrome
from overweave.ops.trial import case_of
from overweave.schedules.catalog import names
from tests.source_tree import ROOT


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "overweave.cli.main", "trace", *words, "--device", "cpu"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_every_schedule_leaves_a_trace(tmp_path: Path, name: str):
    operator, method = name.split(".")
    result = run(operator, "--shape", "128,128,64", "--world", "2", "--plan", method, "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"trace.{name}.json", f"trace.{name}.png"]
    measured, simulated = from_chrome((tmp_path / f"trace.{name}.json").read_bytes())
    assert (measured.name, measured.source, simulated.name, simulated.source) == (name, "measured", name, "simulated")
    busy = {span.kind for span in simulated.spans} - {"wait", "begin"}
    assert busy <= {span.kind for span in measured.spans}
    assert {span.rank for span in measured.spans} == {0, 1}


@pytest.mark.slow
def test_options_reach_both_timelines(tmp_path: Path):
    words = ("all_gather_matmul", "--shape", "256,128,64", "-w", "2", "--plan", "push", "-o", "pieces=4")
    assert run(*words, "--out", str(tmp_path)).returncode == 0
    for timeline in from_chrome((tmp_path / "trace.all_gather_matmul.push.json").read_bytes()):
        assert len([span for span in timeline.spans if span.kind == "copy" and span.rank == 0]) == 4


def test_what_the_interpreter_cannot_end_in_time_torch_computes():
    small, large = (problem_of_shape("all_gather_matmul", shape, 2) for shape in ("256,256,64", "8192,8192,4096"))
    odd = problem_of_shape("all_gather_matmul", "256,256,63", 2)
    depths = [case_of("all_gather_matmul.push", problem, "cpu", {}).depth for problem in (small, large, odd)]
    assert depths == ["interpreter", "library", "library"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("matmul", "--shape", "8,8,8"), "no such operator"),
        (("all_gather_matmul", "--shape", "8,8"), "three numbers"),
        (("all_gather_matmul", "--shape", "64,64,64", "--plan", "scatter"), "unknown"),
        (("all_gather_matmul", "--shape", "64,64,64", "-o", "magic=1", "--plan", "push"), "magic"),
        (("all_gather_matmul", "--shape", "64,64,64", "--world", "8"), "8 ranks on 4 GPUs"),
        (("all_gather_matmul", "--shape", "64,64,64", "--out", "/proc/no/such"), "Name a folder that can be made"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...], reason: str):
    result = CliRunner().invoke(app, ["trace", *words, "--device", "cpu"])
    assert result.exit_code == 2, result.output
    assert reason in result.output
