"""How a first call searches among families of candidates, whatever these are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from overweave.tuner.model.candidate_model import MOST_DESCENTS, Model

BASE_US = 500.0
HEADS = {"library": BASE_US, "quick": 300.0, "allowed": 450.0}


class Variants(NamedTuple):
    """Candidates `name 1`, `name 2`: the second takes a tenth less."""

    name: str
    grid: Mapping[str, tuple[Any, ...]] = {"pieces": (1, 2)}

    def member(self, options: Mapping[str, Any]) -> str:
        return f"{self.name} {options['pieces']}"


def predicted(candidate: str, limit_us: float) -> float:
    name, pieces = candidate.split()
    return HEADS.get(name, 310.0) * (1.0 if pieces == "1" else 0.9)


def must_gain(candidate: str, us: float) -> float:
    """The quick ones would have to gain more than they do; those that are `allowed` need gain nothing."""
    return 0.0 if candidate.startswith(("library", "allowed")) else max(0.0, us + 250.0 - BASE_US)


def searched(names: list[str], **options: Any) -> set[str]:
    model: Model[str] = Model(predicted, **options)
    model.explore([Variants(name) for name in names])
    return set(model.results)


def test_a_quick_candidate_that_may_not_be_taken_hides_none_that_may():
    names = ["library", "quick", "allowed"]
    assert "allowed 2" not in searched(names)
    assert "allowed 2" in searched(names, shortfall=must_gain)


def test_families_that_may_be_taken_are_searched_first():
    names = ["library", *(f"quick{index}" for index in range(MOST_DESCENTS)), "allowed"]
    assert "allowed 2" in searched(names, shortfall=must_gain)
