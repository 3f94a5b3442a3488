"""`overweave trace`: any schedule of the catalog, on emulated ranks, and what it refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overweave.cli.commands import trace
from overweave.cli.main import app
from overweave.cli.plans import case_of as case_of_shape
from overweave.ir.problem import Problem
from overweave.ir.timeline.trace import from_chrome
from overweave.ops.trial import case_of
from overweave.tuner.model.choose import Choice
from tests import forked


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return forked.run("-m", "overweave.cli.main", "trace", *words, "--device", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "part"),
    [
        ("not nightly", "1/4"),
        *(pytest.param("not nightly", f"{part}/4", marks=pytest.mark.nightly) for part in (2, 3, 4)),
        pytest.param("nightly", "1/1", marks=pytest.mark.nightly),
    ],
)
def test_every_schedule_leaves_a_trace(when: str, part: str):
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", when, f"--part={part}"]
    command.append("tests/cli/interpreted_trace.py")
    cases = forked.run(*command, timeout=280)
    assert cases.returncode == 0, cases.stdout[-4000:] + cases.stderr[-2000:]


@pytest.mark.slow
def test_options_reach_both_timelines(tmp_path: Path):
    words = ("all_gather_matmul", "--shape", "512,128,64", "-w", "2", "--plan", "push", "-o", "pieces=4")
    assert run(*words, "--out", str(tmp_path)).returncode == 0
    for timeline in from_chrome((tmp_path / "trace.all_gather_matmul.push.json").read_bytes()):
        assert len([span for span in timeline.spans if span.kind == "copy" and span.rank == 0]) == 4


@pytest.mark.slow
def test_more_ranks_than_a_described_machine_has_are_traced_without_it(tmp_path: Path):
    ended = run("all_gather_matmul", "--shape", "72,72,32", "-w", "9", "--plan", "sequential", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "nothing simulated: 9 ranks are more than the GPUs of h200x8" in ended.stdout
    (measured,) = from_chrome((tmp_path / "trace.all_gather_matmul.sequential.json").read_bytes())
    assert (measured.source, measured.world_size) == ("measured", 9)


def test_what_the_interpreter_cannot_end_in_time_torch_computes():
    small, large = (
        case_of_shape(shape).problem("all_gather_matmul", 2, "bf16") for shape in ("256,256,64", "8192,8192,4096")
    )
    odd = case_of_shape("256,256,63").problem("all_gather_matmul", 2, "bf16")
    depths = [case_of("all_gather_matmul.push", problem, "cpu", {}).depth for problem in (small, large, odd)]
    assert depths == ["interpreter", "library", "library"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("matmul", "--shape", "8,8,8"), "no such operator"),
        (("all_gather_matmul", "--shape", "8,8"), "three numbers"),
        (("all_gather_matmul", "--shape", "64,64,64", "--plan", "scatter"), "unknown"),
        (("all_gather_matmul", "--shape", "64,64,64", "-o", "magic=1", "--plan", "push"), "magic"),
        (("all_gather_matmul", "--shape", "64,64,64", "--world", "8", "--machine", "h200x4"), "8 ranks on 4 GPUs"),
        (("all_gather_matmul", "--shape", "64,64,64", "--out", "/proc/no/such"), "Name a folder that can be made"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...], reason: str):
    result = CliRunner().invoke(app, ["trace", *words, "--device", "cpu"])
    assert result.exit_code == 2, result.output
    assert reason in result.output


def test_the_operators_choice_comes_with_its_options(monkeypatch: pytest.MonkeyPatch):
    chosen = Choice("all_gather_matmul.push", {"pieces": 2, "order": "all_peers"}, "a test")
    monkeypatch.setattr(trace, "choose", lambda problem, target: chosen)
    problem = Problem(operator="all_gather_matmul", world_size=4, m=64, n=64, k=64, dtype="bfloat16")
    options = {"pieces": "4", "order": "all_peers"}
    assert trace._schedule(problem, "cpu", None, {"pieces": "4"}) == (chosen.plan, options)
