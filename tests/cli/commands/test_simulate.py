"""`overweave simulate`: numbers, pictures, traces, files, and what it refuses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import overweave as ow
from overweave.ir.problem import Problem
from overweave.ir.text.files import to_json
from overweave.ir.timeline.trace import from_chrome
from overweave.schedules.catalog.catalog import build, names
from tests.cli.called import called
from tests.source_tree import ROOT

SMALL = ("--shape", "1024,512,256", "--world", "2")


run = partial(called, "simulate")


@pytest.mark.parametrize("name", names())
def test_numbers_for_programs(name: str):
    report = json.loads(run(name, *SMALL, "--json"))
    assert report["plan"] == name
    assert report["total_us"] > report["matmul_us"] > 0
    assert report["effective_communication_us"] == pytest.approx(report["total_us"] - report["matmul_us"], abs=0.002)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert all(rank["compute_us"] > 0 for rank in report["ranks"])


def test_a_machine_without_peer_access_runs_plans_whose_rows_the_library_moves():
    words = (*SMALL, "--machine", "rtx4090x4")
    assert run("matmul_reduce_scatter.sequential", *words)
    assert "do not reach each other's memory" in run("all_gather_matmul.push", *words, exit_code=2)


def test_a_narrow_terminal_costs_no_digits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "30")
    shown = run("all_gather_matmul.push", *SMALL)
    assert "…" not in shown
    assert all(word in shown for word in ("compute", "collective", "overlap"))


def test_what_tiles_store_at_peers_has_no_overlap_of_its_own():
    with_copies, without = (
        next(line for line in run(name, "--shape", "8192,4096,14336").splitlines() if line.startswith("│    0"))
        for name in ("matmul_reduce_scatter.fused_ring", "matmul_reduce_scatter.ring_stored")
    )
    assert float(with_copies.split("│")[-2]) > 0.5
    assert without.split("│")[-2].strip() == ""


def test_the_shape_is_the_global_one():
    def m_n_k(name: str, shape: str) -> float:
        return json.loads(run(name, "--shape", shape, "--world", "4", "--json"))["matmul_us"]

    assert m_n_k("all_gather_matmul.sequential", "8192,14336,4096") == pytest.approx(313, rel=0.02)
    assert m_n_k("matmul_reduce_scatter.sequential", "8192,4096,14336") == pytest.approx(313, rel=0.03)


def test_sizes_that_ranks_do_not_divide_are_those_of_the_first():
    name, uneven = "matmul_reduce_scatter.sequential", ("--shape", "512,512,509", "--world", "2")
    shown = run(name, *uneven)
    assert "k=509 does not divide by 2 ranks: each is taken to have 255" in shown
    assert "does not divide" not in run(name, *SMALL)


def test_a_table_and_a_picture():
    output = run("matmul_reduce_scatter.scatter", *SMALL)
    assert "effective communication" in output
    assert "rank 1 sums" in output
    assert all(sign in output for sign in ("█ compute", "▓ copy", "▚ reduce"))


def test_a_trace_of_every_tile(tmp_path: Path):
    path = tmp_path / "trace.json"
    run("all_gather_matmul.push", *SMALL, "--trace", str(path))
    (timeline,) = from_chrome(path.read_bytes())
    assert timeline.source == "simulated"
    assert any(span.track.startswith("tiles.") for span in timeline.spans)
    assert timeline.arrows


def test_files_hold_plans_and_schedules(tmp_path: Path):
    problem = Problem(operator="all_gather_matmul", m=1024, n=256, k=256, world_size=2, dtype="bfloat16")
    plan = build("all_gather_matmul.push", problem, {})
    named = json.loads(run("all_gather_matmul.push", *SMALL, "--json"))
    for value in (plan, plan.schedule):
        path = tmp_path / "file.json"
        path.write_bytes(to_json(value))
        assert json.loads(run(str(path), "--json"))["total_us"] == pytest.approx(named["total_us"], rel=0.2)


def test_a_plan_of_a_compiled_kernel_needs_the_time_of_a_tile(tmp_path: Path):
    pytest.importorskip("libcst")
    fused = ow.compile(str(ROOT / "examples" / "kernels" / "matmul.py") + ":matmul_kernel", {"A": "all_gather.push"})
    numbers = {"M": 256, "N": 64, "K": 64, "BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 4}
    path = tmp_path / "plan.json"
    path.write_bytes(to_json(fused.plan(numbers, 2, "bfloat16")))
    assert "matmul alone" not in run(str(path), "--tile-us", "10")
    assert "nobody knows how long a tile of a compiled kernel takes" in run(str(path), exit_code=2)
    quick, slow = (json.loads(run(str(path), "--json", "--tile-us", us))["total_us"] for us in ("10", "1000"))
    assert quick + 500 < slow


def test_the_time_of_a_tile_is_not_asked_of_other_plans():
    words = ("all_gather_matmul.push", "--shape", "1024,256,256", "--world", "2", "--tile-us", "10")
    assert "Leave --tile-us out" in run(*words, exit_code=2)


def test_a_file_is_verified_first(tmp_path: Path):
    problem = Problem(operator="all_gather_matmul", m=1024, n=256, k=256, world_size=2, dtype="bfloat16")
    data = json.loads(to_json(build("all_gather_matmul.push", problem, {})))
    data["plan"]["schedule"]["credits"] = []
    path = tmp_path / "file.json"
    path.write_text(json.dumps(data))
    assert "reuse" in run(str(path), exit_code=2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("all_gather_matmul.push",), "no shape"),
        (("all_gather_matmul.push", "--shape", "8,8"), "three numbers"),
        (("all_gather_matmul.push", "--shape", "8,8,-8"), "three numbers"),
        (("all_gather_matmul.push", "--shape", "8,8,9999999999"), "m 0 to 2147483647"),
        (("all_gather_matmul.push", *SMALL, "-o", "n=8"), "Say the sizes once"),
        (("all_gather_matmul.push", "--shape", "8,8,8", "--world", "0"), "greater than or equal to"),
        (("all_gather_matmul.push", "--shape", "512,512,100", "--world", "2"), "need a multiple of 16"),
        (("matmul_reduce_scatter.scatter", "--shape", "512,100,512", "--world", "2"), "need a multiple of 16"),
        (("all_gather_matmul.push", "--shape", "256,256,256", "--world", "16"), "hosts of h200x8x2 do not reach"),
        (("all_gather_matmul.push", "--shape", "64,64,64", "--world", "9", "--machine", "h200x4"), "9 ranks on 4 GPUs"),
        (("all_gather_matmul.push", *SMALL, "--machine", "abacus"), "h200x4"),
        (("all_gather_matmul.push", *SMALL, "-o", "magic=1"), "magic"),
        (("no.such",), "neither a schedule nor a file"),
        (("all_gather_matmul.push", *SMALL, "--trace", "/no/such/folder/t.json"), "write"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...], reason: str):
    assert reason in run(*words, exit_code=2)


def test_ranks_of_several_hosts_take_the_librarys_calls_and_say_by_which_way():
    words = ("--shape", "4096,4096,512", "--machine", "h800x8x2")
    shown = run("all_gather_matmul.sequential", *words, "--world", "16")
    assert "all_gather over 16 ranks of several hosts: ring LL" in shown
    assert "simulated: ranks" not in shown


def test_of_many_hosts_that_do_the_same_one_is_simulated_and_said_to_be():
    words = ("--shape", "4096,4096,512", "--machine", "h800x8x2", "--world", "64")
    assert "simulated: ranks 0 to 7 of 64, one island" in run("all_gather_matmul.sequential", *words)
    report = json.loads(run("all_gather_matmul.sequential", *words, "--json"))
    assert (report["world_size"], [rank["rank"] for rank in report["ranks"]]) == (64, list(range(8)))
