"""The tables of compiled kernels without a GPU: rows, verdicts, variants; tiles compiled; the campaign emulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.lint.authored_cases import AUTHORS, authored_case
from campaigns.lint.compile_times import compiled_us
from campaigns.tables.compiled_parts import _way
from campaigns.tables.compiled_variants import (
    CANDIDATES,
    GATHER,
    SCATTER,
    SCHEDULES,
    SHAPES,
    TENSORS,
    TILE,
    Tile,
    Way,
    backends,
    configs,
    streamed,
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
    merged,
    read,
    show,
    verdicts,
    write,
)
from overweave.schedules.weave.transports import wanted_of
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


def test_rows_come_back_from_their_file(tmp_path: Path):
    path = tmp_path / "rows.csv"
    write(path, AGAINST)
    assert read(path) == [one._replace(rate=round(one.rate, 2)) for one in AGAINST]
    path.write_text("back_end,sms\ncopy_engine,0\n")
    assert read(path) == []


def test_what_is_measured_anew_takes_the_place_of_what_was_known():
    known = [row("tiles", "a", "8", 3.0), row("backends", "a", "1", 2.0), row("tiles", "a", "8", 5.0, SCATTER)]
    found = merged(known, [row("tiles", "b", "8", 4.0)])
    assert [(one.table, one.operator, one.us) for one in found] == [
        ("backends", GATHER, 2.0), ("tiles", SCATTER, 5.0), ("tiles", GATHER, 4.0),
    ]  # fmt: skip


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


def test_a_table_has_a_line_per_series_and_a_column_per_place():
    rows = [row("tiles", "128", "8", 2.0), row("tiles", "128", "16", 4.0), row("tiles", "64", "16", 5.0)]
    assert grid(rows) == [["TFLOP/s", "8", "16"], ["128", "500", "250"], ["64", "", "200"]]
    assert show(rows).splitlines()[0] == "Tile shape, stages and order: all_gather_matmul 8x16x32"


@pytest.mark.parametrize("operator", [GATHER, SCATTER])
def test_variants_are_schedules_and_stand_in_one_place_each(operator: str):
    for variants in (list(backends(operator, TILE)), list(tiles(operator, SHAPES))):
        assert len({(one.series, one.x) for one in variants}) == len({str(one.way) for one in variants}) > 8
        for variant in variants:
            wanted_of(["A", "B"], ["C"], {TENSORS[operator]: variant.way.schedule})
            assert _way(str(variant.way)) == variant.way


def test_streamed_chunks_are_those_of_all_ranks():
    assert [variant.x for variant in streamed(2, TILE, (1, 2, 4, 8))] == ["2", "4", "8", "16", "32"]


def test_the_tuner_may_choose_every_tile_shape_of_the_table():
    shapes = {(one["BLOCK_M"], one["BLOCK_N"], one["BLOCK_K"]) for one in configs(SHAPES)}
    assert shapes == {shape[:3] for shape in SHAPES}


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
