"""What a caller's words ask for, and what is no plan."""

from __future__ import annotations

import pytest

from overweave.errors import InputError
from overweave.tuner.space.space import candidate, candidate_of

AG = "all_gather_matmul"


@pytest.mark.parametrize(
    ("words", "plan", "options"),
    [
        ("push", "push", {}),
        (f"{AG}.push pieces=4", "push", {"pieces": "4"}),  # as `overweave explain` and every error spell it
        ("  push\n order=ring   pieces=2 ", "push", {"pieces": "2", "order": "ring"}),
        ("sequential", "sequential", {}),
        ("torch.fused", "torch.fused", {}),
    ],
)
def test_a_plan_by_its_short_or_full_name(words: str, plan: str, options: dict[str, str | int]):
    assert candidate_of(AG, words) == candidate(plan, options)


@pytest.mark.parametrize("words", ["push " + "x" * 5000, "x" * 5000, "push pieces=2 pieces=" + "9" * 5000])
def test_an_error_does_not_repeat_all_of_a_long_text(words: str):
    with pytest.raises(InputError) as caught:
        candidate_of(AG, words)
    assert len(str(caught.value)) < 800
