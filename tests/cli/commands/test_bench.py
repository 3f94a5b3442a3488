"""`overweave bench` from outside: it starts its own ranks, and runs as one of torchrun's."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from benchmarks import results_page, teach
from campaigns.choices import acceptance, sim_accuracy
from overweave.cli.commands import bench
from overweave.cli.main import app
from overweave.hardware import multicast
from overweave.tuner.measure.bench import BenchRequest, BenchRun
from tests import forked
from tests.source_tree import ROOT

COMMAND = [sys.executable, "-m", "overweave.cli.main", "bench"]
OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")

# As a rank writes it: two cases, 2 and 4 us.
RUN = {
    "operator": OPERATORS[0], "world_size": 2, "device": "cpu", "dtype": "bf16", "effort": {"rounds": 30, "warmup": 1},
    "date": "", "versions": {}, "devices": ["cpu"],
    "cases": [
        {
            "case": {"name": name, "m": 64, "n": 64, "k": 64}, "left_out": {},
            "methods": [{"name": "overweave", "label": "", "median_us": us, "p90_us": us, "host_us": None,
                         "speedups": {}, "measures": None}],
        }
        for name, us in (("even", 2.0), ("ragged", 8.0))
    ],
}  # fmt: skip


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "shapes.json"
    cases = [{"name": "even", "m": 64, "n": 64, "k": 64}, {"name": "ragged", "m": 37, "n": 40, "k": 24}]
    path.write_text(json.dumps({"cases": cases, "source": "a test"}))
    return path


def called(command: list[str]) -> str:
    result = forked.run(*command[1:], timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "repeats"),
    [
        (OPERATORS[0], 1),
        pytest.param(OPERATORS[0], 2, marks=pytest.mark.nightly),
        *(pytest.param(operator, 1, marks=pytest.mark.nightly) for operator in OPERATORS[1:]),
    ],
)
def test_own_ranks_and_whole_runs(operator, repeats, shapes, tmp_path):
    out = tmp_path / "result.json"
    options = ["--shapes", str(shapes), "--world", "2", "--device", "cpu", f"--repeat={repeats}", "--json", str(out)]
    shown = called([*COMMAND, operator, *options])
    assert "overweave" in shown
    report = json.loads(out.read_text())
    assert report["shapes_source"] == "a test"
    assert report["unfinished"] == ""
    assert len(report["runs"]) == repeats
    for run in report["runs"]:
        assert (run["operator"], run["world_size"], run["device"]) == (operator, 2, "cpu")
        for case in run["cases"]:
            assert {"matmul", "communication", "sequential", "overweave"} <= {row["name"] for row in case["methods"]}
    numbers = report["spread"]["overweave"]["time_us"]
    assert numbers["least"] <= numbers["middle"] <= numbers["largest"]


@pytest.mark.nightly  # tests/ops/test_islands.py runs a program under torchrun by day
def test_under_torchrun(shapes):
    shapes.write_text(json.dumps({"cases": json.loads(shapes.read_text())["cases"][:1]}))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    shown = called([*launcher, *COMMAND[2:], OPERATORS[0], "--shapes", str(shapes), "--device", "cpu"])
    assert shown.count("even: [64, 64] @ [64, 64]") == 1


def as_on_gpus(report: dict[str, Any]) -> dict[str, Any]:
    """What the readers of result files look at, and a CPU does not give."""
    for run in report["runs"]:
        run["device"] = "cuda"
        for method in (method for case in run["cases"] for method in case["methods"]):
            method["host_us"] = 20.0
            if method["measures"] is not None:
                method["measures"]["overlap_efficiency"] = 0.9
    return report


def ended_in_the_middle(command: list[str], out: Path, number: int) -> subprocess.CompletedProcess[str]:
    """A bench that gets a signal, and none of its ranks, when its file holds a case."""
    started = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    end_s = time.monotonic() + 120
    while not out.exists() and started.poll() is None and time.monotonic() < end_s:
        time.sleep(0.05)
    started.send_signal(number)
    _, told = started.communicate(timeout=60)  # every rank holds stderr: that it ends says that they are gone
    return subprocess.CompletedProcess(command, started.returncode, "", told)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_a_bench_has_finished_outlives_it_and_its_ranks_do_not(number, tmp_path, monkeypatch, capsys):
    shapes, out, table = tmp_path / "shapes.json", tmp_path / "mlp.it.json", tmp_path / "table.json"
    large = {"name": "large", "m": 4096, "n": 4096, "k": 4096}  # for which the test does not wait
    shapes.write_text(json.dumps({"cases": [{"name": "even", "m": 64, "n": 64, "k": 64}, large]}))
    ranks = 4 if number == signal.SIGINT else 2
    options = ["--shapes", str(shapes), f"--world={ranks}", "--device", "cpu", "--repeat", "3", "--json", str(out)]
    ended = ended_in_the_middle([*COMMAND, OPERATORS[0], *options], out, number)
    so_far = "1 of 2 cases of run 1 of 3"
    if number != signal.SIGKILL:
        assert ended.returncode == 128 + number
        assert f"{out} is unfinished: {so_far}" in ended.stderr
        assert "Traceback" not in ended.stderr
    report = json.loads(out.read_text())
    assert report["unfinished"] == so_far
    assert [[case["case"]["name"] for case in run["cases"]] for run in report["runs"]] == [["even"]]

    out.write_text(json.dumps(as_on_gpus(report)))
    assert acceptance.main([str(out)]) == 1
    assert f"FAIL  all_gather_matmul W={ranks}: all that was asked for: unfinished, {so_far}" in capsys.readouterr().out
    sim_accuracy.main([str(out)])
    assert f"all_gather_matmul W={ranks} unfinished even" in capsys.readouterr().out
    table.write_bytes((ROOT / f"overweave/tuner/tables/h200x{ranks}.json").read_bytes())
    teach.main([str(table), str(out)])
    assert f"mlp.it.json (unfinished: {so_far}): 1 problems" in capsys.readouterr().out
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    (read,) = results_page.latest()
    assert f"**unfinished: {so_far}**" in results_page.table(read)


def test_runs_are_started_one_by_one_and_each_knows_those_before(shapes, tmp_path, monkeypatch):
    """What the file holds while the second of three runs is at work, and when its ranks fail."""
    out, seen = tmp_path / "out.json", []
    asked = ["bench", OPERATORS[0], f"--shapes={shapes}", "--world=2", "--device=cpu", "--dtype=bf16"]
    asked += ["--plan=push pieces=2", "--repeat=3"]

    def as_rank(request: BenchRequest, group: object, operator_for: object, on_progress: object) -> Iterator[BenchRun]:
        whole = msgspec.convert(RUN, BenchRun)
        for done in (1, 2) if len(seen) == 1 else (1,):
            yield msgspec.structs.replace(whole, cases=whole.cases[:done])

    def start_ranks(words: list[str], world_size: int, variables: dict[str, str]) -> None:
        seen.append((words, world_size, variables))
        with monkeypatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            patched.setenv("RANK", "0")
            patched.setenv("WORLD_SIZE", str(world_size))
            patched.setattr(bench, "runs", as_rank)
            patched.setattr(bench, "join_world", lambda device: nullcontext())
            result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert (result.exit_code, result.stdout) == (0, "")  # whoever started the ranks prints
        if len(seen) == 2:
            raise typer.Exit(7)

    monkeypatch.setattr(bench, "start_ranks", start_ranks)
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(app, [*asked, f"--json={out}"])
    assert result.exit_code == 7
    assert "is unfinished: 1 of 2 cases of run 2 of 3" in " ".join(result.output.split())
    assert seen == [([*asked, f"--json={out}"], 2, {bench.RUN_NUMBER: str(turn)}) for turn in (1, 2)]
    report = json.loads(out.read_text())
    assert report["command"] == shlex.join(["overweave", *asked])
    assert (report["middle"], [len(run["cases"]) for run in report["runs"]]) == (0, [2, 1])
    assert report["spread"]["overweave"]["time_us"]["largest"] == 4.0  # of the whole run alone


@pytest.mark.parametrize(("options", "variables"), [([], {}), (["--no-multicast"], dict(multicast.WITHOUT))])
def test_ranks_are_told_to_go_without_multicast(monkeypatch: pytest.MonkeyPatch, shapes, options, variables):
    seen = []

    def start_ranks(words: list[str], world_size: int, given: dict[str, str]) -> None:
        seen.append(given)
        raise typer.Exit(7)

    monkeypatch.setattr(bench, "start_ranks", start_ranks)
    monkeypatch.delenv("RANK", raising=False)
    asked = ["bench", "all_gather_matmul", f"--shapes={shapes}", "--world=2", "--device=cpu", *options]
    assert CliRunner().invoke(app, asked).exit_code == 7
    assert seen == [{bench.RUN_NUMBER: "1", **variables}]


@pytest.mark.nightly
def test_an_operator_of_a_file_is_benched(shapes, tmp_path):
    (tmp_path / "mine.py").write_text("from tests.extending import toy_operator\ntoy_operator.add()\n")
    options = ["--shapes", str(shapes), "--world", "2", "--device", "cpu", "--dtype", "fp32"]
    shown = called([*COMMAND[:-1], "--load", str(tmp_path / "mine.py"), "bench", "all_gather_both_matmul", *options])
    assert "all_gather_both_matmul: 2 x cpu" in shown
    assert shown.count("even: [64, 64] @ [64, 64]") == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["ring_attention"], "no such operator"),
        (["all_gather_matmul", "--shapes", "nowhere"], "no such file or set"),
        (["all_gather_matmul", "--device", "cuda", "--world", "31"], "GPUs"),
        (["all_gather_matmul", "--plan", "scatter"], "`overweave show` lists all"),
        (["all_gather_matmul", "--plan", "push", "--plan", "push pieces=0"], "Give one of 1..64"),
        (["all_gather_matmul", "--device", "cpu", "--json", "/"], "it is a folder"),
        (["all_gather_matmul", "--device", "cpu", "--json", "no/such/folder/it.json"], "No such file or directory"),
    ],
)
def test_bad_input_is_one_typed_error(options, word, monkeypatch):
    monkeypatch.setattr(bench, "start_ranks", lambda *words: pytest.fail("nothing may be started"))
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code in (1, 2)
    assert word in result.output
    assert "Traceback" not in result.output


def test_a_case_that_cannot_be_is_refused_before_the_others_are_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "start_ranks", lambda *words: pytest.fail("nothing may be started"))
    path, case = tmp_path / "shapes.json", {"name": "a", "m": 64, "n": 64, "k": 64}
    path.write_text(json.dumps({"cases": [case, case | {"name": "b", "after": "tanh"}]}))
    result = CliRunner().invoke(app, ["bench", OPERATORS[0], "--shapes", str(path), "--device=cpu"])
    assert result.exit_code == 2
    assert "'tanh' is none" in result.output
    path.write_text(json.dumps({"cases": [case, case | {"name": "b", "n": 96}]}))
    command = ["bench", OPERATORS[0], "--shapes", str(path), "--device=cpu", "--dtype=fp8", "-w", "4"]
    assert "n=24" in CliRunner().invoke(app, command).output


def test_whole_runs_are_no_matter_of_one_of_torchruns_ranks(monkeypatch, shapes):
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(app, ["bench", OPERATORS[0], "--shapes", str(shapes), "--device=cpu", "--repeat=2"])
    assert result.exit_code == 2
    assert "torchrun started this process" in result.output
