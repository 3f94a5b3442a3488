"""`overweave bench` from outside: it starts its own ranks, and runs as one of torchrun's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from overweave.cli.bench import without_destination
from overweave.cli.main import app
from tests.source_tree import ROOT

COMMAND = [sys.executable, "-m", "overweave.cli.main", "bench"]
OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "shapes.json"
    cases = [{"name": "even", "m": 64, "n": 64, "k": 64}, {"name": "ragged", "m": 37, "n": 40, "k": 24}]
    path.write_text(json.dumps({"cases": cases, "source": "a test"}))
    return path


def called(command: list[str]) -> str:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "repeats"), list(zip(OPERATORS, (2, 1, 1), strict=True)))
def test_own_ranks_and_whole_runs(operator, repeats, shapes, tmp_path):
    out = tmp_path / "result.json"
    options = ["--shapes", str(shapes), "--world", "2", "--device", "cpu", f"--repeat={repeats}", "--json", str(out)]
    shown = called([*COMMAND, operator, *options])
    assert "overweave" in shown
    report = json.loads(out.read_text())
    assert report["shapes_source"] == "a test"
    assert len(report["runs"]) == repeats
    for run in report["runs"]:
        assert (run["operator"], run["world_size"], run["device"]) == (operator, 2, "cpu")
        for case in run["cases"]:
            assert {"matmul", "communication", "sequential", "overweave"} <= {row["name"] for row in case["methods"]}
    numbers = report["spread"]["overweave"]["time_us"]
    assert numbers["least"] <= numbers["middle"] <= numbers["largest"]


@pytest.mark.slow
def test_under_torchrun(shapes):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    shown = called([*launcher, *COMMAND[2:], OPERATORS[0], "--shapes", str(shapes), "--device", "cpu"])
    assert shown.count("even: [64, 64] @ [64, 64]") == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["ring_attention"], "no such operator"),
        (["all_gather_matmul", "--shapes", "nowhere"], "no such file or set"),
        (["all_gather_matmul", "--device", "cuda", "--world", "31"], "GPUs"),
        (["all_gather_matmul", "--plan", "scatter"], "Schedules: all_gather_matmul.sequential"),
        (["all_gather_matmul", "--plan", "push", "--plan", "push pieces=0"], "Give one of 1..64"),
    ],
)
def test_bad_input_is_one_typed_error(options, word):
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code in (1, 2)
    assert word in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("destination", [["--json", "there/it.json"], ["--json=there/it.json"], []])
def test_a_report_says_how_to_repeat_it_and_not_where_it_lay(destination: list[str]):
    words = ["bench", "all_gather_matmul", "--shapes", "mlp"]
    assert without_destination([*words, *destination, "--world", "4"]) == [*words, "--world", "4"]
