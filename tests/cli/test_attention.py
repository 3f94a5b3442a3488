"""Attention in the commands: shown, proven, simulated and predicted by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overweave.attention.cases import AttentionCase
from overweave.attention.predicted import predicted
from overweave.hardware.machine import load
from overweave.ir.text.parse import from_text
from overweave.schedules.records.attention import ATTENTION, PLANS
from tests.cli.called import called

SHAPE = ("--shape", "32768,32,128")


@pytest.mark.parametrize("name", ATTENTION.names())
def test_what_is_shown_is_proven(name: str, tmp_path: Path):
    file = tmp_path / "it.txt"
    options = ("-w", "4", "-o", "tokens=14", "-o", "layout=contiguous", "-o", "causal=false")
    file.write_text(called("show", name, *options))
    assert from_text(file.read_text()).name == name
    assert called("verify", str(file)).startswith("proven")
    assert called("verify", name, *options).startswith(f"proven: {name}")


def test_a_ring_writes_places_again():
    assert called("show", "attention.ring", "--world", "4").count(": retire ") == 2 * 4


@pytest.mark.slow
def test_what_is_simulated_is_what_is_predicted():
    case = AttentionCase("", 32768, 32, 128, 8)
    for plan, us in predicted(case, 4, load("h200x4")).plans.items():
        report = json.loads(called("simulate", f"attention.{plan}", *SHAPE, "-o", "groups=8", "--json"))
        assert report["total_us"] == pytest.approx(us, rel=0.01)


@pytest.mark.slow
def test_cases_are_predicted_without_ranks(tmp_path: Path):
    file = tmp_path / "it.json"
    shown = called("bench", "attention", "--simulate=h200x8", "-w", "8", "--tokens=32768", f"--json={file}")
    found = json.loads(file.read_text())
    assert len(found) == 4
    assert all(set(each["plans"]) == set(PLANS) for each in found)
    assert "Attn-2.zigzag.causal.trained.tokens=32768" in shown


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["show", "attention.rings"], "nearest first: attention."),
        (["show", "attention.ring", "-o", "experts=2"], "Options of attention: tokens, heads, head_dim"),
        (["show", "attention.ring", "-o", "causal=perhaps"], "causal"),
        (["show", "attention.ring", "-o", "tokens=13"], "no 2 x 4 pieces"),
        (["show", "attention.heads", "-o", "heads=6"], "do not divide"),
        (["simulate", "attention.ring"], "tokens of all ranks, heads, columns of a head"),
        (["simulate", "attention.ring", *SHAPE, "-o", "heads=4"], "--shape beside -o heads="),
        (["verify", "attention.ring", "-o", "tokens=13"], "no 2 x 4 pieces"),
        (["bench", "attention", "--device=cpu", "--plan", "push"], "no such plan"),
        (["bench", "attention", "--device=cpu", "--dtype=fp8"], "Name another dtype"),
        (["bench", "attention", "--device=cpu", "--shapes", "mlp"], "one of the sets: attention, tiny"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], found: str):
    assert found in called(*words, exit_code=2)
