"""How much Python calls on CPU ranks may be: functions entered, so that no busy machine decides."""

from __future__ import annotations

import pytest

from campaigns.host.host_path import PLANS, cpu_calls

MOST_NAMED, MOST_CHOSEN = 6_850, 9_130  # half, and two thirds, of what commit 8e3f1c9 entered
MOST_WARM = 200
MOST_FILES = 95


@pytest.mark.parametrize("plan", PLANS)
def test_calls_enter_few_functions(plan: str | None):
    """MEASURED: 13,700 cold in either way at commit 8e3f1c9, most of them for rows of tables that nobody asked for."""
    most, found = MOST_CHOSEN if plan is None else MOST_NAMED, cpu_calls(plan)
    if found.cold.total() > most:  # ranks that wait for a late one look again and again
        found = cpu_calls(plan)
    assert found.cold.total() <= most, found.cold.most_common()
    assert plan is None or not found.cold["table.py"]
    assert found.warm <= MOST_WARM
    assert found.files <= MOST_FILES
