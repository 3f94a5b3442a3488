"""Layers of experts in the commands: shown, proven, simulated, compared and predicted by name."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

from overweave.cli.commands import compare, simulate
from overweave.hardware.machine import load
from overweave.ir.text.parse import from_text
from overweave.moe.cases import ExpertsCase, RoutingStatistics
from overweave.moe.predicted import predicted
from overweave.schedules.records.experts import EXPERTS, PLANS
from tests import forked
from tests.cli.called import called
from tests.source_tree import ROOT

SHAPE = ("--shape", "8192,1536,2048")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS.names())
def test_what_is_shown_is_proven(name: str, tmp_path: Path):
    text, file, page = tmp_path / "it.txt", tmp_path / "it.json", tmp_path / "it.html"
    text.write_text(called("show", name, "-w", "3", "-o", "m=7", "-o", "n=24"))
    assert from_text(text.read_text()).name == name
    called("show", name, "-w", "3", "-o", "m=7", "-o", "n=24", "--json", str(file), "--html", str(page))
    for each in (text, file):
        assert "proven" in called("verify", str(each))
    assert "each operation one step" in page.read_text()


@pytest.mark.parametrize("name", EXPERTS.names())
def test_numbers_for_programs(name: str):
    report = json.loads(called("simulate", name, *SHAPE, "--json"))
    assert report["plan"] == name
    assert all(rank["compute_us"] > 0 for rank in report["ranks"])
    moved = "collective_us" if name.endswith("sequential") else "copy_us"
    assert all(rank[moved] > 0 for rank in report["ranks"])


@pytest.mark.slow
def test_what_is_simulated_is_what_is_predicted():
    case = ExpertsCase("", 2048, 1536, "expert", RoutingStatistics(8192, 32, 5, 0.8))
    options = [word for pair in ("experts=32", "topk=5", "skew=0.8", "parallel=expert") for word in ("-o", pair)]
    for plan, us in predicted(case, 4, load("h200x4")).plans.items():
        report = json.loads(called("simulate", f"experts_mlp.{plan}", *SHAPE, *options, "--json"))
        assert report["total_us"] == pytest.approx(us, rel=0.01)


def test_two_plans_are_compared():
    shown = called("compare", "experts_mlp.sequential experts=32", "experts_mlp.sequential experts=8 topk=1", *SHAPE)
    assert "B is" in shown


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (simulate, ["simulate", "experts_mlp.sequential"]),
        (compare, ["compare", *["experts_mlp.sequential topk=1"] * 2]),
    ],
)
def test_torch_is_loaded_before_memory_is_limited_for_a_file(command: ModuleType, words: list[str]):
    done: list[str] = []

    def limited(*paths: Path) -> AbstractContextManager[None]:
        done.extend(["limit", *(path.name for path in paths)])
        return nullcontext()

    def load_for(*names: str) -> None:
        done.append(f"load for {names[0]}")

    file = ROOT / "overweave" / "hardware" / "machines" / "h200x4.json"
    with patch.object(command, "limited", limited), patch.object(command, "load_for", load_for):
        called(*words, *SHAPE, f"--machine={file}")
    assert done == ["load for experts_mlp.sequential", "limit", "h200x4.json"]


def test_the_plan_of_a_layer_is_explained():
    """What a call takes, by the rule that calls ask, and what each plan is predicted to take."""
    many = called("explain", "experts_mlp", *SHAPE, "--machine=h200x4", "-o", "experts=32")
    assert "experts_mlp.push runs, because a rank's tokens are" in many
    assert "-> push" in many
    report = json.loads(called("simulate", "experts_mlp.push", *SHAPE, "-o", "experts=32", "--json"))
    assert f"push        predicted {report['total_us']:.1f} us" in many
    for words, why in (
        (["experts_mlp", "--shape", "64,1536,2048", "--machine=h200x4"], "tokens of a rank are 65536 bytes"),
        (["experts_mlp", *SHAPE, "--device=cpu"], "there are no GPUs"),
        (["experts_all_reduce", *SHAPE, "--machine=h200x4"], "nobody has measured its other plans"),
        (["all_gather_experts", *SHAPE, "--machine=rtx4090x4"], "GPUs do not reach each other's memory"),
    ):
        shown = called("explain", *words)
        assert f"{words[0]}.sequential runs, because {why}" in shown
        assert "-> sequential" in shown


@pytest.mark.slow
def test_layers_are_predicted_without_ranks(tmp_path: Path):
    file = tmp_path / "it.json"
    shown = called(
        "bench", "experts", "--shapes=tiny", "--simulate=h200x8", "-w", "8", "--tokens=4096", f"--json={file}"
    )
    found = json.loads(file.read_text())
    assert len(found) == 4
    assert all(set(each["plans"]) == set(PLANS) for each in found)
    assert "tiny.expert.zipf=0.8.tokens=4096" in shown
    assert "with a skewed router at most" in shown


@pytest.mark.nightly
def test_layers_are_timed_on_own_ranks(tmp_path: Path):
    file = tmp_path / "it.json"
    words = ("--shapes=tiny", "--device=cpu", "-w2", "--tokens=8", "--plan=sequential", f"--json={file}")
    shown = forked.run("-m", "overweave.cli.main", "bench", "experts", *words, timeout=240).stdout
    (run,) = json.loads(file.read_text())["runs"]
    assert len(run["cases"]) == 4
    assert not any(case["left_out"] for case in run["cases"])
    assert "expert parallel, at most 512 tokens, 2 cases: the quickest of ours" in shown
    assert "times are no figures of any machine" in shown


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["show", "experts_mlp.pusch"], "nearest first: experts_mlp."),
        (["show", "experts_mlp.sequential", "-o", "pieces=2"], "'pieces' is unknown. Options of experts: m, n, k"),
        (["show", "experts_mlp.sequential", "-o", "experts=0"], "experts"),
        (["show", "experts_mlp.sequential", "-o", "topk=9"], "top 9 of 8 experts"),
        (["simulate", "experts_mlp.sequential"], "no shape"),
        (["simulate", "experts_mlp.sequential", *SHAPE, "-o", "m=4"], "--shape beside -o m="),
        (["simulate", "experts_mlp.sequential", *SHAPE, "--tile-us", "4"], "Leave --tile-us out"),
        (["simulate", "experts_mlp.sequential", *SHAPE, "-w", "7"], "1536 of an expert over 7 ranks"),
        (["explain", "experts_mlp.push", *SHAPE], "Name the operator alone"),
        (["explain", "experts_mlp", *SHAPE, "--dtype=fp8"], "predicted in bf16"),
        (["explain", "experts_mlp", *SHAPE, "--norm"], "end as they are"),
        (["explain", "experts_mlp", *SHAPE, "-o", "topk=9"], "top 9 of 8 experts"),
        (["explain", "experts_mlp", *SHAPE, "-o", "m=9"], "--shape beside -o m="),
        (["explain", "experts_mlp", *SHAPE, "-w", "7"], "1536 of an expert over 7 ranks"),
        (["explain", "experts_mlp", *SHAPE, "--device=cpu", "--machine=h200x4"], "Leave one of the two out"),
        (["explain", "all_gather_matmul", *SHAPE, "-o", "topk=9"], "only experts have options"),
        (["bench", "experts", "--device=cpu", "--plan", "ring"], "no such plan"),
        (["simulate", "experts_mlp.foo"], "nearest first: experts_mlp."),
        (["simulate", "experts_mlp.foo", *SHAPE, "-o", "m=4"], "there is none of this name"),
        (["bench", "experts", "--device=cpu", "--shapes", "mlp"], "one of the sets: moe, tiny"),
        (["bench", "experts", "--device=cpu", "-w", "5"], "over 5 ranks"),
        (["bench", "experts", "--simulate=h200x4", "-w", "16"], "16 ranks"),
        (["bench", "all_gather_matmul", "--device=cpu", "--tokens=4"], "only experts and attention have tokens"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], found: str):
    assert found in called(*words, exit_code=2)
