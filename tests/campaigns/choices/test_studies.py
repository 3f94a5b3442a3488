"""The studies on CPU ranks, small: a table with every point, and a picture."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.choices.studies import main
from campaigns.choices.study_pictures import save_study
from campaigns.choices.study_table import PUSHES, STUDIES, TILE_ROWS, Layer, Point
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.schedules.catalog.options import PIECES
from tests.source_tree import ROOT

LAYER = Layer(512, 32, 48)


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("operator", PUSHES)
def test_every_variant_is_a_plan_and_no_two_are_one(name: str, operator: str):
    for shard in (1, 128, 2048):
        variants = list(STUDIES[name].variants(operator, shard))
        assert len({(variant.series, variant.x) for variant in variants}) == len(variants)
        case = LAYER.case(operator)
        problem = Problem(operator=operator, m=4 * shard, n=case.n, k=case.k, world_size=4, dtype="bfloat16")
        for variant in variants:
            method, *options = variant.plan.split()
            build(f"{operator}.{method}", problem, dict(option.split("=") for option in options))


def test_chunks_are_halved_from_a_shard_to_a_tile():
    rows = [int(variant.x) for variant in STUDIES["pieces"].variants("all_gather_matmul", 2048)]
    assert sorted(set(rows), reverse=True) == [2048, 1024, 512, 256, TILE_ROWS]


def test_a_long_shard_is_cut_as_often_as_schedules_take():
    plans = [variant.plan for variant in STUDIES["pieces"].variants("all_gather_matmul", 32768)]
    assert f"pieces={PIECES.high}" in plans[-1]


def test_rotation_changes_the_order_of_the_peers_and_nothing_else():
    problem = Problem(operator="all_gather_matmul", m=512, n=64, k=32, world_size=4, dtype="bfloat16")
    on, off = (
        build("all_gather_matmul.push", problem, {"rotation": way, "pieces": 1}).schedule for way in ("on", "off")
    )
    first = [[next(schedule.of_rank(rank)).writes[0].rank for rank in range(4)] for schedule in (on, off)]
    assert first == [[3, 0, 1, 2], [1, 0, 0, 0]]
    assert {each.name for each in on.operations} == {each.name for each in off.operations}


def point(x: str, median_us: float | None) -> Point:
    return Point(
        study="programs", operator="all_gather_matmul", layer="1x2x3", world_size=2, device="cpu", series="pieces=1",
        x=x, plan="push", median_us=median_us, p90_us=median_us, efficiency=None, matmul_us=1.0,
        communication_us=2.0, sequential_us=3.0, ceiling_us=None,
    )  # fmt: skip


def test_a_point_that_was_left_out_is_no_point_of_the_picture(tmp_path: Path):
    path = tmp_path / "study.png"
    save_study(path, STUDIES["programs"], [point("copy engine", 4.0), point("4", None), point("8", 5.0)])
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_described_machine_needs_no_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["--simulate=h200x4", "--studies", "programs", "--layers", "2048x4096x14336", f"--out={tmp_path}"])
    assert "SMs that communicate" in capsys.readouterr().out
    lines = list(csv.DictReader((tmp_path / "programs.csv").open()))
    assert {line["operator"] for line in lines} == set(PUSHES)
    assert all(float(line["median_us"]) > float(line["matmul_us"]) > 0 for line in lines)


@pytest.mark.slow
def test_the_command_writes_a_table_and_a_picture_of_every_study(tmp_path: Path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "campaigns.studies",
        "--device=cpu", f"--layers={LAYER}", "--rounds=1", f"--out={tmp_path}",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    for name, study in STUDIES.items():
        lines = list(csv.DictReader((tmp_path / f"{name}.csv").open()))
        expected = [variant.plan for operator in PUSHES for variant in study.variants(operator, 256)]
        assert [line["plan"] for line in lines] == expected
        assert all(float(line["median_us"]) > 0 and float(line["matmul_us"]) > 0 for line in lines)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
