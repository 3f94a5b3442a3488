"""The tables of compiled kernels without a GPU: rows, verdicts, variants; tiles compiled; the campaign emulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.lint.authored_cases import AUTHORS, authored_case
from campaigns.lint.compile_times import compiled_us
from campaigns.tables.compiled_parts import (
    CANDIDATES,
    GATHER,
    SCHEDULES,
    SHAPES,
    TENSORS,
    Tile,
    Way,
    backends,
    tiles,
)
from campaigns.tables.table_rows import (
    BEST,
    CHOSEN,
    COMPILED,
    PORTABLE,
    TORCH,
    Row,
    grid,
    read,
    verdicts,
)
from tests.source_tree import ROOT, python_path
from tools.aot import compile_kernel

SHARED_BYTES = 232448  # that a block may have on Hopper


def row(table: str, series: str, x: str, us: float, operator: str = GATHER) -> Row:
    return Row(table, operator, "8x16x32", series, x, "how", us, us + 1, 1e3 / us)


AGAINST = [
    row("against", COMPILED, "MLP-1", 102.0),
    row("against", PORTABLE, "MLP-1", 100.0),
    row("against", TORCH, "MLP-1", 110.0),
    row("against", COMPILED, "MLP-2", 103.0),
    row("against", PORTABLE, "MLP-2", 100.0),
    row("against", TORCH, "MLP-2", 105.0),
]


def test_the_comparison_is_judged_by_geometric_means():
    by_hand, over_torch = verdicts(AGAINST)
    assert by_hand.holds
    assert "1.025, worst MLP-2 1.030, 2 cases" in by_hand.found
    assert over_torch.holds
    assert "worst MLP-2 1.019" in over_torch.found
    slower = [one._replace(us=one.us * 1.02) if one.series == COMPILED else one for one in AGAINST]
    assert [verdict.holds for verdict in verdicts(slower)] == [False, False]
    assert not any(verdict.holds for verdict in verdicts(AGAINST[:1]))


@pytest.mark.parametrize(("us", "holds"), [(101.9, True), (102.1, False)])
def test_the_choice_of_the_tuner_is_judged(us: float, holds: bool):
    (verdict,) = verdicts([row("tuner", CHOSEN, "time", us), row("tuner", BEST, "time", 100.0)])
    assert verdict.holds == holds
    assert str(verdict).startswith("PASS" if holds else "FAIL")


def test_compile_times_are_judged_by_the_longest():
    rows = [row("compile", "matmul", f"A={count}", us) for count, us in enumerate((4e5, 1.2e6))]
    assert [verdict.holds for verdict in verdicts(rows)] == [False]
    assert [verdict.holds for verdict in verdicts(rows[:1])] == [True]
    assert grid(rows) == [["ms", "exchanges", "median", "longest"], ["matmul", "2", "800", "1200"]]


LAUNCHED = sorted({variant.way.tile._replace(group=8) for variant in tiles(GATHER, SHAPES)} | set(CANDIDATES))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tile",
    [
        pytest.param(tile, marks=pytest.mark.nightly if index % 2 else (), id=str(tile))
        for index, tile in enumerate(LAUNCHED)
    ],
)
def test_every_tile_compiles_without_spilling(tile: Tile, tmp_path: Path):
    blocks = {"a_desc": (tile.block_m, tile.block_k), "b_desc": (tile.block_n, tile.block_k)}
    blocks["c_desc"] = (tile.block_m, tile.block_n)
    described = {name: f"tensordesc<bf16[{m}, {n}]>" for name, (m, n) in blocks.items()}
    author = AUTHORS[tile.kernel]
    constants = {name: value for name, value in tile.constants.items() if name.startswith("BLOCK")}
    author = author._replace(
        constants={**author.constants, **constants},
        options={"num_warps": tile.warps, "num_stages": tile.stages},
        types=described if tile.kernel == "persistent" else author.types,
    )
    resources = compile_kernel(
        authored_case(tmp_path, tile.kernel, author, {"A": SCHEDULES[GATHER][0]}).source
    ).resources
    assert resources.spill_bytes == 0
    assert resources.shared_bytes <= SHARED_BYTES


@pytest.mark.slow
def test_a_kernel_is_compiled_in_under_a_second_without_triton():
    author = AUTHORS["matmul"]
    took_us = [compiled_us("matmul", author, author.exchanges[0]) for _ in range(3)]
    assert min(took_us) < 1e6


@pytest.mark.nightly
def test_every_part_measures_on_emulated_ranks(tmp_path: Path):
    path = tmp_path / "tables.csv"
    command = [sys.executable, str(ROOT / "tests" / "campaigns" / "interpreted_tables.py"), str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    rows = read(path)
    counts = {(table, operator): 0 for table in ("against", "backends", "tiles", "tuner") for operator in TENSORS}
    for one in rows:
        counts[one.table, one.operator] = counts.get((one.table, one.operator), 0) + 1
    assert all(counts.values()), counts
    hows = {one.how for one in rows if one.table == "backends" and one.operator == GATHER}
    assert hows == {str(Way(one.way.schedule, TILE_OF_TEST)) for one in backends(GATHER, TILE_OF_TEST, (1, 2), (8,))}
    assert {one.series for one in rows if one.table == "tuner"} == {CHOSEN, BEST}
    assert [one.x for one in rows if one.table == "streamed"] == ["2", "4", "8"]


TILE_OF_TEST = Tile("matmul", 16, 16, 16, 4, 2, 8)
