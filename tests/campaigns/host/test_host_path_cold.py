"""How much Python the first call of a signature may be: functions entered, so that no busy machine decides."""

from __future__ import annotations

import pytest

from campaigns.host.host_path_cold import PLANS, cold_calls

MOST_NAMED, MOST_CHOSEN = 6_850, 9_130  # half, and two thirds, of what commit 8e3f1c9 entered


@pytest.mark.parametrize("plan", PLANS)
def test_a_first_call_enters_few_functions(plan: str | None):
    """MEASURED: 13,700 in either way at commit 8e3f1c9, most of them for rows of tables that nobody asked for."""
    entered = cold_calls(plan)
    assert entered.total() <= (MOST_CHOSEN if plan is None else MOST_NAMED), entered.most_common()
    assert plan is None or not entered["table.py"]
