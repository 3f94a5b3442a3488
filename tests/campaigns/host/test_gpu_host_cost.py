"""What the campaign makes of what a GPU told: intervals that overlap count once, and each budget is judged."""

from __future__ import annotations

import pytest

from campaigns.host.gpu_host_cost import Cost, busy, verdicts
from campaigns.host.host_cases import CASES
from overweave.tuner.store.cache import ranked, shipped


@pytest.mark.parametrize(
    ("intervals", "us"),
    [
        ([], 0.0),
        ([(0, 2), (5, 6)], 3.0),
        ([(5, 6), (0, 2), (1, 4)], 5.0),
        ([(0, 10), (2, 3), (4, 12)], 12.0),
    ],
)
def test_time_in_which_something_runs(intervals: list[tuple[float, float]], us: float):
    assert busy(intervals) == us


def test_budgets():
    good = Cost(29.0, 50.0, 100.0, 93.0)
    for cost, kept in (
        (good, [True, True]),
        (good._replace(host_us=31.0), [False, True]),
        (good._replace(kernels_us=91.0), [True, False]),
        (good._replace(kernels_us=None), [True, False]),
    ):
        assert [verdict.holds for verdict in verdicts({"a plan": cost})] == kept
    both = verdicts({"a": good, "b": good._replace(host_us=40.0)})
    assert "worst 40.0 (b), 1 of 2 above" in str(both[0])


def test_every_plan_of_ours_in_the_shipped_tables_is_timed():
    tables = [shipped("NVIDIA H200", ranks) for ranks in (2, 4)]
    entries = [entry for table in tables if table for entry in table.entries]
    chosen = {(entry.problem.operator, ranked(entry.problem.operator, entry.times)[0].plan) for entry in entries}
    assert {one for one in chosen if not one[1].startswith("torch.")} <= {
        (case.operator, case.plan.split()[0]) for case in CASES
    }


def test_a_line_says_what_is_not_known():
    assert Cost(1.0, 2.0, 3.0, None).line(CASES[0]).split()[:5] == ["1.0", "2.0", "3.0", "-", "-"]
