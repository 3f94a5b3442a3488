"""The exactness campaign, cut short; and that it would notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from campaigns.exact import exactness, faults
from campaigns.exact.lock import BY_DAY, by_day, differing, digest, kept, plans, verdicts
from campaigns.exact.same_bits import PLANS, TILES, cases, compared, digests
from overweave.schedules.methods.registry import METHODS
from tests.ranks import run_ranks
from tests.source_tree import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("world_size", exactness.WORLDS)
def test_random_shapes(world_size: int):
    assert run_ranks(exactness.try_shapes, world_size, "library", 12, 1, timeout_s=120) == [[]] * world_size


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 8])
def test_successive_calls_with_a_late_rank(world_size: int):
    assert run_ranks(exactness.try_calls, world_size, "library", 200, 2, timeout_s=120) == [[]] * world_size


def try_spoiled(count: int) -> list[str]:
    honest = exactness.compute

    def spoiled(*arguments: Any) -> torch.Tensor:
        result = honest(*arguments)
        result[:1, :1] += 1
        return result

    with patch.object(exactness, "compute", spoiled):
        return exactness.try_shapes("library", count, 3)


@pytest.mark.slow
def test_a_single_wrong_element_is_noticed():
    wrong = [line for told in run_ranks(try_spoiled, 2, 6) for line in told]
    assert sum("not bit-equal" in line for line in wrong) >= 6


# The fault campaign, cut short.


@pytest.mark.slow
@pytest.mark.parametrize("trial", list(faults.trials(6, "library", seed=5)), ids=str)
def test_faults_are_handled(trial: faults.Trial):
    reasons, _ = faults.run(trial)
    assert reasons == []


# The plans that this checkout writes are the locked ones, and another plan would be seen.


@pytest.mark.slow
def test_plans_are_as_locked():
    changed = differing(kept()["plans by day"], by_day())
    assert not changed, "`python -m campaigns.lock --write` locks them anew; the commit says what changed, and why"


def test_every_method_is_locked_in_every_way():
    for kind in ("plans by day", "plans", "predicted times"):
        assert kept()[kind].keys() == METHODS.keys(), kind
    assert {kind for kind in kept() if kind.startswith("PTX")} == {"PTX of Triton 3.6.0", "PTX of Triton 3.9.0"}


def test_a_plan_that_differs_would_be_seen():
    method = METHODS["all_gather_matmul.push"]
    changed = plans(method, BY_DAY._replace(rows=(38,)))
    old, new = {"plans": {"push": digest(plans(method, BY_DAY))}}, {"plans": {"push": digest(changed)}}
    assert [verdict.holds for verdict in verdicts(old, new)] == [False]
    assert [verdict.holds for verdict in verdicts(old, old)] == [True]


# Two checkouts are compared case by case; here the second is this one, too.


def test_a_bit_that_differs_on_one_rank_is_told():
    old = [{"a": "1", "b": "2", "c": "3", "d": "refused: x"}] * 2
    new = [
        {"a": "1", "b": "2", "c": "refused: gone", "d": "refused: y"},
        {"a": "1", "b": "9", "c": "refused: gone", "d": "4"},
    ]
    differing, missing, same = compared(old, new)
    assert differing == ["b"]
    assert missing == {"c": "new refused: gone", "d": "old refused: x"}
    assert same == 1


def test_every_plan_stands_in_the_matrix_with_integers_and_floats():
    found = {(case.operator, case.is_integer) for case in cases(TILES)}
    assert found == {(operator, is_integer) for operator in PLANS for is_integer in (False, True)}


@pytest.mark.slow
def test_a_checkout_computes_what_it_computes():
    first, second = digests(Path(ROOT), 2, "all_gather_matmul.push"), digests(Path(ROOT), 2, "all_gather_matmul.push")
    assert compared(first, second)[::2] == ([], len(first[0]))
