"""`overweave verify`: proven, refuted, unusable or not decided, for people and for programs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overweave.cli.main import app
from overweave.cli.plans import load
from overweave.errors import ScheduleRefused, ScheduleUndecided

RUN = CliRunner()


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    assert RUN.invoke(app, ["show", "all_gather_matmul.push", "-w", "2", "--json", str(path)]).exit_code == 0
    return path


def edit(path: Path, change) -> None:
    envelope = json.loads(path.read_text())
    change(envelope["plan"])
    path.write_text(json.dumps(envelope))


def verify(path: Path, *words: str):
    return RUN.invoke(app, ["verify", str(path), *words])


def test_a_plan_as_it_was_shown_is_proven(plan: Path):
    assert verify(plan).exit_code == 0
    assert "proven" in verify(plan).output
    assert json.loads(verify(plan, "--json").output) == {
        "name": "all_gather_matmul.push",
        "verdict": "proven",
        "refusals": [],
        "notes": [],
    }
    assert load(plan).tile_orders


def test_a_text_is_proven_too(tmp_path: Path):
    path = tmp_path / "schedule.txt"
    path.write_text(RUN.invoke(app, ["show", "matmul_reduce_scatter.fused_ring", "-w", "3"]).output)
    assert verify(path).exit_code == 0


def test_a_wait_that_is_left_out_is_refuted_with_its_operation_and_rank(plan: Path):
    edit(plan, lambda p: p["schedule"]["operations"][-1].update(waits=[]))
    result = verify(plan, "--json")
    assert result.exit_code == 1
    answer = json.loads(result.output)
    assert answer["verdict"] == "refuted"
    assert {"rule", "operation", "rank", "region", "message"} == set(answer["refusals"][0])
    assert "arrived@1" in answer["refusals"][0]["message"]
    assert "refuted" in verify(plan).output
    with pytest.raises(ScheduleRefused):
        load(plan)


def test_tables_that_say_something_else_are_refuted(plan: Path):
    rows = [list(row) for row in load(plan).tile_orders[0].rows]
    rows[0][3] += 1
    edit(plan, lambda p: p.update(tile_orders=[{"rank": 0, "queue": "tiles", "rows": rows}]))
    assert verify(plan).exit_code == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["schedule"].update(more=1),
        lambda p: p["realization"]["engines"].pop(),
        lambda p: p["realization"]["engines"].clear(),
        lambda p: p["schedule"]["operations"][0].update(kind="steal"),
    ],
)
def test_what_cannot_be_a_plan_is_unusable(plan: Path, change):
    edit(plan, change)
    assert verify(plan).exit_code in (1, 2)
    assert json.loads(verify(plan, "--json").output)["verdict"] in ("unusable", "refuted")


def test_more_tiles_than_anyone_runs_are_refused_before_they_are_made(tmp_path: Path):
    path = tmp_path / "large.json"
    RUN.invoke(app, ["show", "all_gather_matmul.push", "-w", "2", "-o", "m=4096", "-o", "n=4096", "--json", str(path)])
    assert verify(path).exit_code == 0
    edit(path, lambda p: p["realization"]["matmul"].update(block_m=1, block_n=1))
    result = verify(path)
    assert result.exit_code == 2
    assert "more than 4194304 tiles" in result.output


def test_a_missing_file_is_unusable(tmp_path: Path):
    assert verify(tmp_path / "none").exit_code == 2
    assert verify(tmp_path).exit_code == 2


def test_what_is_too_large_is_not_decided(plan: Path):
    edit(plan, lambda p: p["schedule"].update(world_size=2**31 - 1))
    result = verify(plan, "--json")
    assert result.exit_code == 3
    assert json.loads(result.output)["verdict"] == "not decided"
    assert "not decided: all_gather_matmul.push" in verify(plan).output
    with pytest.raises(ScheduleUndecided):
        load(plan)


def test_a_file_name_is_any_bytes(plan: Path):
    path = plan.rename(plan.with_name(os.fsdecode(b"pl\xe4n")))
    assert verify(path).exit_code == 0
    path.write_bytes(b"{")
    for command in ("verify", "simulate"):
        result = RUN.invoke(app, [command, str(path), "--json"])
        assert (result.exit_code, json.loads(result.stdout)["verdict"]) == (2, "unusable")


def test_nobody_waits_for_who_writes_into_a_pipe(tmp_path: Path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    result = verify(path)
    assert result.exit_code == 2
    assert "not a regular file" in result.output
