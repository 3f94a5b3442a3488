"""What the shipped tables chose is counted from their rows."""

from __future__ import annotations

from campaigns.choices.plan_wins import counts
from overweave.schedules.methods.registry import REPLACED


def test_each_row_has_one_winner_and_no_plan_that_is_gone():
    rows, found = counts()
    assert sum(told["won"] for told in found.values()) == rows > 200
    assert all(told["won"] <= told["near"] <= told["tried"] for told in found.values())
    assert not {f"{operator}.{plan}" for operator, plan in found} & set(REPLACED)
