"""What the campaign over Figure 15 of Flux makes of its rows, and one row of it."""

from __future__ import annotations

import pytest

from campaigns.choices import flux_hosts
from campaigns.choices.flux_hosts import CLUSTERS, FLAT, GATHER, LEVELS, LIBRARY, ONE_SIDED, SCATTER, LargeGroup, Row


def rows(levels_us: float, flat_us: float = 9000.0) -> list[Row]:
    times = {LIBRARY: 1500.0, LEVELS: levels_us, ONE_SIDED: 1500.0, FLAT: flat_us}
    return [Row(each, operator, 500.0, times, "ring LL") for each in CLUSTERS for operator in (GATHER, SCATTER)]


def test_a_speedup_that_is_not_the_papers_fails_unless_a_reason_is_known():
    near, far = (flux_hosts.verdicts(rows(us), []) for us in (1000.0, 500.0))
    assert [each.holds for each in near] == [True, True, True, True]
    assert [each.holds for each in far] == [None, False, False, True]
    assert rows(1000.0)[0].efficiency(LEVELS) == 0.5
    assert "estimates" in far[0].found


def test_a_flat_push_that_is_not_much_slower_and_a_slow_prediction_fail():
    found = flux_hosts.verdicts(rows(1000.0, flat_us=5000.0), [LargeGroup(64, "x", 1.0, 11.0)])
    assert [each.holds for each in found[-2:]] == [False, False]


@pytest.mark.slow
def test_the_gather_on_h800s_is_within_the_tolerance(capsys: pytest.CaptureFixture[str]):
    row = flux_hosts.row(CLUSTERS[2], GATHER)
    assert abs(row.speedup(row.best) / CLUSTERS[2].speedup - 1.0) <= flux_hosts.TOLERANCE
    assert row.times_us[FLAT] >= flux_hosts.LEAST_GAIN * row.times_us[ONE_SIDED]
    assert "ring" in str(row)
