"""What the campaign makes of what a GPU told: intervals that overlap count once, and each budget is judged."""

from __future__ import annotations

import pytest
import torch

from campaigns.host import host_parts
from campaigns.host.gpu_host_cost import TORCHS, Cost, busy, told, verdicts
from campaigns.host.host_cases import CASES
from overweave.tuner.store.cache import shipped
from overweave.tuner.store.table import ranked


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
    good = Cost(29.0, 9.0, 50.0, 100.0, 93.0)
    for cost, kept in (
        (good, [True, True]),
        (good._replace(host_us=31.0), [False, True]),
        (good._replace(kernels_us=91.0), [True, False]),
        (good._replace(kernels_us=None), [True, False]),
    ):
        found = verdicts({"a plan": cost})
        assert [holds for holds, _ in found] == kept
        assert [line[:4] for _, line in found] == ["PASS" if each else "FAIL" for each in kept]
    both = verdicts({"a": good, "b": good._replace(host_us=40.0)})
    assert "worst 40.0 (b), 1 of 2 above" in both[0][1]


def test_torchs_own_are_told_and_not_judged():
    dear = Cost(300.0, 270.0, 300.0, 100.0, 50.0)
    assert [holds for holds, _ in verdicts({str(case): dear for case in TORCHS})] == [False, False]
    with_ours = {str(case): dear for case in TORCHS} | {str(CASES[0]): Cost(29.0, None, 50.0, 100.0, 93.0)}
    assert [holds for holds, _ in verdicts(with_ours)] == [True, True]


def test_every_plan_of_the_shipped_tables_is_timed():
    tables = [shipped("NVIDIA H200", ranks) for ranks in (2, 4)]
    entries = [entry for table in tables if table for entry in table.entries]
    taken = {(entry.problem.operator, ranked(entry.problem.operator, entry.times)[0].plan) for entry in entries}
    assert taken <= {(case.operator, case.plan.split()[0]) for case in (*CASES, *TORCHS)}


def test_a_line_says_what_is_not_known():
    assert Cost(1.0, None, 2.0, 3.0, None).line(CASES[0]).split()[:7] == ["1.0", "-", "-", "2.0", "3.0", "-", "-"]


def test_what_is_ours_is_told_of_every_plan_and_decides_nothing():
    costs = {"a": Cost(60.0, 40.0, 50.0, 100.0, 93.0), str(TORCHS[2]): Cost(90.0, 31.0, 90.0, 100.0, 93.0)}
    assert told(costs).startswith("FAIL  host beyond")
    assert f"worst 59.0 ({TORCHS[2]}), 1 of 2 above" in told(costs)
    assert told({"a": costs["a"]}).startswith("PASS")
    assert [holds for holds, _ in verdicts(costs)] == [False, True]


def test_calls_that_are_set_beside_each_other_are_timed_by_turns(monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: ran.append("|"))
    monkeypatch.setattr(host_parts, "slowest", lambda us: us)
    found = host_parts.by_turns_us(lambda: ran.append("a"), lambda: ran.append("b"))
    assert len(found) == 2
    assert min(found) > 0
    assert "".join(ran) == f"|{'a' * host_parts.BURST}|{'b' * host_parts.BURST}" * host_parts.BURSTS
