"""What is chosen unmeasured of two ranks, held against layers where every such plan was measured."""

from __future__ import annotations

import json

import pytest

from campaigns.choices.cold_choice import GPU
from overweave.ir.problem import Problem
from overweave.tuner.model.rank import cold_choice, rank_candidates
from overweave.tuner.space.shapes import ShapeCase
from tests.tuner.test_layers import RESULTS

MEASURED = json.loads((RESULTS / "rings.matmul_reduce_scatter.h200x2.2026-11-22.json").read_text())["runs"][0]["cases"]
LIBRARY = ("sequential", "torch_fused")


def chosen(problem: Problem) -> str:
    """The plan, and how it sums: pieces and tiles are the tuner's."""
    taken = cold_choice(rank_candidates(problem, GPU, is_thorough=False), problem).candidate
    return " ".join([taken.plan, *("sums=epilogue" for name, value in taken.options if value == "epilogue")])


def kind_of(name: str) -> str:
    plan, *options = name.removeprefix("plan.").split()
    return " ".join([plan, *(option for option in options if option.startswith("sums"))])


@pytest.mark.slow
@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row["case"]["name"])
def test_choices_of_two_ranks_are_near_the_best_and_never_behind_what_users_had(row: dict[str, object]):
    times: dict[str, float] = {}
    for method in row["methods"]:  # type: ignore[attr-defined]
        kind = kind_of(method["name"])
        times[kind] = min(method["median_us"], times.get(kind, method["median_us"]))
    case = ShapeCase(**{name: row["case"][name] for name in ("name", "m", "n", "k")})  # type: ignore[index]
    taken = chosen(case.problem("matmul_reduce_scatter", 2, "bf16"))
    ours = min(times[kind] for kind in ("scatter", "scatter sums=epilogue", "ring_stored"))
    assert times[taken] < min(times[name] for name in LIBRARY)
    assert times[taken] < 1.1 * ours
