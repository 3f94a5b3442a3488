"""What is measured of a space, and what is made of the times; the measuring itself is in tests/ops/test_tune.py."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.schedules.families.finer import EXCHANGE_METHODS, GATHER_METHODS
from overweave.schedules.records.outside import TORCH_FUSED
from overweave.tuner.measure import search
from overweave.tuner.measure.baselines import BenchSide, Setting
from overweave.tuner.measure.search import MOST_BY_MODEL, WORTH_VARYING, Tuned, shortlist
from overweave.tuner.model.candidate_model import Weighed
from overweave.tuner.model.rank import rank_candidates
from overweave.tuner.space.space import Candidate, candidate
from overweave.tuner.space.target import Target
from overweave.tuner.store.cache import Entry, Time

GPU, CPU = Target("cuda"), Target("cpu")
HOST = torch.device("cpu")
PROBLEM = Problem(operator="all_gather_matmul", m=2048, n=1024, k=1024, world_size=4, dtype="bfloat16")
LIBRARY, PUSH, PULL = Candidate("sequential"), candidate("push", {"pieces": 1}), candidate("pull", {"pieces": 1})


def test_what_was_quickest_is_varied_and_the_quickest_of_all_are_timed_once_more():
    asked: list[list[str]] = []

    def measure(names: Iterable[str]) -> dict[str, float]:
        asked.append(list(names))
        us = {name: len(name) - 0.5 * (len(asked) == 3) for name in asked[-1]}
        return dict(sorted(us.items(), key=lambda item: item[1]))

    times = search.search(measure, ["aaa", "bb"], lambda times: [next(iter(times))[:1]], finalists=2)
    assert asked == [["aaa", "bb"], ["b", "bb"], ["b", "bb"]]
    assert list(times.items()) == [("b", 0.5), ("bb", 1.5), ("aaa", 3.0)]
    assert search.search(lambda names: {}, ["a"], lambda times: ["b"], finalists=1) == {}


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_shortlist_holds_the_best_by_model_and_all_that_need_no_kernel(operator: str):
    weighed = rank_candidates(replace(PROBLEM, operator=operator), GPU)
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
    listed = shortlist(rank_candidates(replace(PROBLEM, n=1001), GPU), PROBLEM.operator)
    finer = [
        Candidate(method.name)
        for method in (*GATHER_METHODS, *EXCHANGE_METHODS)
        if method.grids and method.operator == PROBLEM.operator
    ]
    assert listed == [LIBRARY, Candidate(TORCH_FUSED), Candidate("per_shard"), *finer]
    assert Candidate(TORCH_FUSED) not in shortlist(rank_candidates(PROBLEM, CPU), PROBLEM.operator)


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


@pytest.mark.parametrize("operator", OPERATORS)
def test_inputs_are_those_of_the_ranks_part(operator: str):
    """x of all rows or of the rank's own, the factors of the product beside it, and whole matrices alike everywhere."""
    problem = replace(PROBLEM, operator=operator, m=10, n=24, k=16)
    first, last = (
        BenchSide(
            problem, Setting(SimpleNamespace(world_size=4, rank=rank, process_group=None), HOST, torch.float32, print)
        )
        for rank in (0, 3)
    )
    for side, rows in ((first, 3), (last, 1)):
        rows = rows if problem.record.has_row_shards else 10
        assert side.xs[0].shape == (rows, 16)
        assert side.rights[0].shape == (16, 24)
        assert side.matmul(0).shape == (10, 24)
    assert torch.equal(first.lefts[0], last.lefts[0]) == problem.record.gathers
    assert not torch.equal(first.rights[0], last.rights[0])
