"""What is measured of a space, and what is made of the times; the measuring itself is in tests/ops/test_tune.py."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.ir.plan import Problem
from overweave.tuner import dressed_side, search
from overweave.tuner.rank import Weighed, weigh
from overweave.tuner.search import MOST_BY_MODEL, WORTH_VARYING, Tuned, shortlist
from overweave.tuner.space import SPACE, TORCH_FUSED, Candidate, candidate
from overweave.tuner.table import Entry, Time
from overweave.tuner.target import Target

GPU, CPU = Target("cuda"), Target("cpu")
PROBLEM = Problem(operator="all_gather_matmul", m=2048, n=1024, k=1024, world_size=4, dtype="bfloat16")
LIBRARY, PUSH, PULL = Candidate("sequential"), candidate("push", {"pieces": 1}), candidate("pull", {"pieces": 1})


@pytest.mark.parametrize("operator", SPACE)
def test_the_shortlist_holds_the_best_by_model_and_all_that_need_no_kernel(operator: str):
    weighed = weigh(replace(PROBLEM, operator=operator), GPU)
    listed = shortlist(weighed, operator)
    fused = [what for what in listed if what.is_fused(operator)]
    times = {each.candidate: each.predicted_us for each in weighed if each.predicted_us is not None}
    others = [us for what, us in times.items() if what.is_fused(operator) and what not in fused]
    assert len(fused) == MOST_BY_MODEL
    assert max(times[what] for what in fused) <= min(others)
    unfused = [each.candidate for each in weighed if not each.obstacle and not each.candidate.is_fused(operator)]
    assert [what for what in listed if not what.is_fused(operator)] == unfused
    assert LIBRARY in unfused


def test_the_models_own_choice_is_always_measured():
    slow = [Weighed(candidate("push", {"pieces": number}), 10.0 + number) for number in range(1, 9)]
    cold = slow[-1].candidate
    assert cold not in shortlist(tuple(slow), "all_gather_matmul")
    assert cold in shortlist(tuple(slow), "all_gather_matmul", cold)


def test_what_cannot_be_is_not_measured():
    listed = shortlist(weigh(replace(PROBLEM, n=1001), GPU), PROBLEM.operator)
    assert listed == [LIBRARY, Candidate(TORCH_FUSED), Candidate("per_shard")]
    assert Candidate(TORCH_FUSED) not in shortlist(weigh(PROBLEM, CPU), PROBLEM.operator)


def test_tile_shapes_are_varied_where_that_may_win():
    near, far = {LIBRARY: 100.0, PUSH: 99 * WORTH_VARYING}, {LIBRARY: 100.0, PUSH: 101 * WORTH_VARYING}
    assert all(what.plan == "push" for what in search._variations(near, PROBLEM, GPU))
    assert len(search._variations(near, PROBLEM, GPU)) > 4
    assert search._variations(far, PROBLEM, GPU) == []
    assert search._variations({LIBRARY: 1.0}, PROBLEM, GPU) == []


def test_how_fast_the_models_choice_is():
    entry = Entry(PROBLEM, (Time("push", {"pieces": 1}, 8.0), Time("sequential", {}, 10.0)))
    assert Tuned(entry, PUSH, {}).cold_share == 1.0
    assert Tuned(entry, LIBRARY, {}).cold_share == 0.8
    assert Tuned(entry, PULL, {}).cold_share is None
    assert Tuned(entry, None, {}).cold_share is None


@pytest.mark.parametrize("operator", SPACE)
def test_inputs_are_those_of_the_global_matmul(operator: str, monkeypatch: pytest.MonkeyPatch):
    """A gather's weight is split by columns among ranks, a sum's by rows; then one rank's part is the problem."""
    monkeypatch.setattr(dressed_side, "side", lambda *asked: asked)
    n, k = (4 * 1000, 1024) if operator == "all_gather_matmul" else (1000, 4 * 1024)
    asked = dressed_side.side_of(replace(PROBLEM, operator=operator, n=1000), None)
    assert asked == (operator, 2048, n, k, None)
