"""What the campaign makes of what a GPU told: intervals that overlap count once, and each budget is judged."""

from __future__ import annotations

from campaigns.host.gpu_host_cost import Cost, verdicts
from campaigns.host.host_cases import CASES
from overweave.tuner.store.cache import ranked, shipped


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
