"""`overweave compare`: two calls, simulated or read, in words, in a table and on a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overweave.cli.commands.compare import verdict
from overweave.cli.main import app
from overweave.ir.problem import Problem
from overweave.ir.text.files import to_json
from overweave.ir.timeline.timeline import TimelineSpan, make_timeline
from overweave.schedules.catalog.catalog import build
from tests.cli.called import called

SMALL = ("--shape", "1024,512,256", "--world", "2")


run = partial(called, "compare")


@pytest.mark.slow
def test_two_schedules_are_compared_in_a_sentence_and_on_a_page(tmp_path: Path):
    page = tmp_path / "page.html"
    shown = run("all_gather_matmul.push pieces=2", "all_gather_matmul.sequential", *SMALL, "--html", str(page))
    assert shown.startswith("A takes ")
    assert "times as fast as" in shown
    assert "us of communication exposed" in shown
    text = page.read_text()
    assert "simulated: all_gather_matmul.push" in text
    assert "simulated: all_gather_matmul.sequential" in text


def test_traces_and_plans_are_read_from_files(tmp_path: Path):
    trace, plan = tmp_path / "trace.json", tmp_path / "plan.json"
    simulate = CliRunner().invoke(app, ["simulate", "all_gather_matmul.push", *SMALL, "--trace", str(trace)])
    assert simulate.exit_code == 0
    problem = Problem(operator="all_gather_matmul", m=1024, n=256, k=256, world_size=2, dtype="bfloat16")
    plan.write_bytes(to_json(build("all_gather_matmul.push", problem, {})))
    shown = run(str(trace), str(plan))
    assert "both are equally fast" in shown


def test_the_quicker_one_is_named():
    quick = make_timeline("a", "measured", 1, [TimelineSpan(0, "q", "x", "compute", 0, 10)])
    slow = make_timeline("b", "simulated", 1, [TimelineSpan(0, "q", "x", "copy", 0, 15)])
    assert verdict(slow, quick) == (
        "A takes 15.0 us (simulated) and B takes 10.0 us (measured): B is 1.50 times as fast as A."
        " A leaves 15.0 us of communication exposed, B leaves 0.0 us."
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("all_gather_matmul.pusch", "all_gather_matmul.push", *SMALL), "nearest first: all_gather_matmul.push"),
        (("all_gather_matmul.push", "all_gather_matmul.pull"), "no shape"),
        (("", "all_gather_matmul.pull", *SMALL), "neither a schedule nor a file"),
        (("all_gather_matmul.push magic=1", "all_gather_matmul.pull", *SMALL), "magic"),
        (("all_gather_matmul.push", "all_gather_matmul.pull", *SMALL, "--html", "no/such/page.html"), "write"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...], reason: str):
    assert reason in run(*words, exit_code=2)
