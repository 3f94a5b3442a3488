"""The choice of a first call beside all methods: it is near the best on unlike machines, and a bad one is seen."""

from __future__ import annotations

from typing import Any

import pytest

from campaigns.choices import choice_by_machine
from campaigns.choices.choice_by_machine import LEAST_SHARE, Row, main, row, verdicts
from overweave.tuner.model.candidate_model import Model
from overweave.tuner.model.rank import clear_predictions
from overweave.tuner.space.shapes import read_shapes
from tests.clock import slowness

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
SPREAD = 1.1  # of processors that count as quickly, and behind many other tests. The campaign allows MOST_S.


def found(machine: str, operator: str, shapes: str, case: str, ranks: int) -> Row:
    one = next(each for each in read_shapes(shapes, operator).cases if each.name == case)
    return row(machine, one.problem(operator, ranks, "bf16"), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "operator", "shapes", "case", "ranks", "plan"),
    [
        ("a100_pciex8", GATHER, "gpt3", "m=2048", 8, "ring"),
        ("h200x4", GATHER, "mlp", "MLP-1", 4, "push"),
        ("b200x8", SCATTER, "mlp", "MLP-1", 8, ""),
        ("rtx4090x4", SCATTER, "mlp", "MLP-2", 4, ""),
    ],
)
def test_a_first_call_chooses_nearly_as_well_as_all_methods_would(
    machine: str, operator: str, shapes: str, case: str, ranks: int, plan: str
):
    before = slowness()
    each = found(machine, operator, shapes, case, ranks)
    assert each.share >= LEAST_SHARE, str(each)
    assert each.took_s <= SPREAD * choice_by_machine.MOST_S * max(before, slowness())
    assert each.taken.split()[0] == plan or not plan


@pytest.mark.slow
def test_a_choice_that_looks_at_too_little_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Rings, and what is written for the links, left out of the first call, not of the simulation of all methods."""
    explore, left_out = Model.explore, ("ring", "synth")

    def overlooking(self: Model[Any], families: Any) -> Any:
        return explore(self, [each for each in families if not any(word in each.plan for word in left_out)])

    monkeypatch.setattr(Model, "explore", overlooking)
    each = found("a100_pciex8", GATHER, "gpt3", "m=2048", 8)
    clear_predictions()
    assert each.share < LEAST_SHARE
    assert verdicts([each])[0].holds is False


def test_a_choice_that_takes_too_long_is_made_anew_and_the_least_counts(monkeypatch: pytest.MonkeyPatch):
    seconds = [0.9, 0.4, 0.1]
    monkeypatch.setattr(choice_by_machine, "_first_call", lambda problem, target: ("", seconds.pop(0), 2.0))
    assert choice_by_machine._quickest_try(None, None) == ("", 0.4, 2.0)
    seconds[:] = [0.9, 0.8, 0.7, 0.1]
    assert choice_by_machine._quickest_try(None, None) == ("", 0.7, 2.0)


def test_nothing_to_judge_is_no_pass_and_an_unknown_machine_is_named(capsys: pytest.CaptureFixture[str]):
    assert verdicts([])[0].holds is False
    assert main(["--machines", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err
