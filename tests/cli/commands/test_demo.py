"""`overweave demo`: what it prints, writes, and how it ends when a result is wrong.

In processes of their own: one that has compiled a kernel cannot interpret one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from overweave.cli import ranks as cli_ranks
from overweave.cli.commands import demo as command
from overweave.cli.commands.demo import problem_for
from overweave.cli.main import app
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.timeline.trace import from_chrome
from tests.source_tree import ROOT


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code + "\nfrom overweave.cli.main import main\nmain()", "demo", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


def test_the_real_problem_is_the_same_on_every_world():
    assert problem_for(OPERATORS["all_gather_matmul"], "cuda", 4).n * 4 == 14336
    assert problem_for(OPERATORS["matmul_reduce_scatter"], "cuda", 4).k * 4 == 14336
    assert problem_for(OPERATORS["all_gather_matmul"], "cpu", 3).m % 3 == 0


@pytest.mark.parametrize(
    ("gpus", "words", "ranks", "told"),
    [
        (1, (), 4, "share one GPU"),
        (1, ("--ranks=2",), 2, "share one GPU"),
        (2, ("--ranks=4",), 4, "share 2 GPUs"),
        (2, (), 2, "GPUs"),
    ],
)
def test_ranks_run_on_the_gpus_that_there_are(
    gpus: int, words: tuple[str, ...], ranks: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("RANK", raising=False)
    started: list[object] = []
    monkeypatch.setattr(cli_ranks, "start_ranks", lambda words, ranks: started.append((words, ranks)))
    result = CliRunner().invoke(app, ["demo", f"--out={tmp_path}", *words], catch_exceptions=False)
    assert result.exit_code == 0
    assert started == [(["demo", f"--ranks={ranks}", "--device=cuda", f"--out={tmp_path}"], ranks)]
    what, times = command.describe_ranks("cuda", ranks)
    assert what.endswith(told)
    assert ("say nothing of overlap" in times) == ("share" in told)


@pytest.mark.parametrize(
    ("place", "gpus", "ranks", "forecast"),
    [("cpu", 0, 3, 4), ("cuda", 1, 4, 4), ("cuda", 2, 2, 2), ("cuda", 8, 8, 8), ("cuda", 16, 16, 4), ("cuda", 1, 1, 4)],
)
def test_the_forecast_is_for_as_many_gpus_as_ran(
    place: str, gpus: int, ranks: int, forecast: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert command.forecast_ranks(place, ranks) == forecast


def test_the_times_of_interpreted_kernels_are_told_for_what_they_are():
    assert "say nothing of a GPU" in command.describe_ranks("cpu", 4)[1]


def test_a_folder_that_cannot_be_made_is_told_before_ranks_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "run_trials", lambda *asked: pytest.fail("nothing may be started"))
    result = CliRunner().invoke(app, ["demo", "--device", "cpu", "--out", "/proc/no/such"])
    assert result.exit_code == 2
    assert "Name a folder that can be made" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_on_emulated_ranks(tmp_path: Path, ranks: int):
    result = run("", "--device", "cpu", "--ranks", str(ranks), "--out", str(tmp_path / "new"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" yes ") == 2
    assert f"rank {ranks - 1} tiles" in result.stdout
    assert (tmp_path / "new" / "demo.png").read_bytes().startswith(b"\x89PNG")
    timelines = from_chrome((tmp_path / "new" / "demo.json").read_bytes())
    assert [timeline.source for timeline in timelines] == ["measured", "simulated"] * 2
    assert [timeline.world_size for timeline in timelines] == [ranks, 4] * 2
    gather, scatter = timelines[0], timelines[2]
    assert {span.kind for span in gather.spans} >= {"compute", "copy", "begin"}
    assert {span.kind for span in scatter.spans} >= {"compute", "copy", "reduce", "begin"}
    for timeline in (gather, scatter):
        assert {track for _, track in timeline.tracks()} >= {"tiles.000", "tiles.001", "tiles.002", "copies"}
        assert timeline.spans[0].begin_us == 0
        # 32 x 64 tiles of [128 * ranks, 128] on each rank, each once.
        tiles = [span for span in timeline.spans if span.kind == "compute"]
        assert len({(span.rank, span.name) for span in tiles}) == len(tiles) == ranks * 4 * ranks * 2
        # What waits for a signal begins to run after the last thing that set it.
        assert timeline.arrows
        for arrow in timeline.arrows:
            assert timeline.spans[arrow.target].end_us >= timeline.spans[arrow.source].begin_us


@pytest.mark.slow
def test_a_wrong_result_is_told_and_fails(tmp_path: Path):
    spoil = (
        "from overweave.ops.reference import PlainCollectives\n"
        "right = PlainCollectives.all_gather\n"
        "PlainCollectives.all_gather = lambda self, shard: right(self, shard) + 1\n"
    )
    result = run(spoil, "--device", "cpu", "--ranks", "2", "--out", str(tmp_path))
    assert result.returncode == 1, result.stderr
    assert " NO " in result.stdout
    assert result.stdout.count(" yes ") == 1


@pytest.mark.nightly
def test_without_matplotlib_everything_but_the_picture(tmp_path: Path):
    hide = "import sys\nsys.modules['matplotlib'] = None\n"
    result = run(hide, "--device", "cpu", "--ranks", "2", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "pip install 'matplotlib>=3.9'" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]


@pytest.mark.gpu(2)
def test_on_gpus(tmp_path: Path):
    result = run("", "--device", "cuda", "--ranks", "2", "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" yes ") == 2
    gather = from_chrome((tmp_path / "demo.json").read_bytes())[0]
    assert 100 < gather.total_us < 5000
    assert gather.overlap_ratio() > 0.3
