"""The plans that this checkout writes are the locked ones, and another plan would be seen."""

from __future__ import annotations

import pytest

from campaigns.exact.lock import BY_DAY, by_day, differing, digest, kept, plans, verdicts
from overweave.schedules.methods.registry import METHODS


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
