"""How much Python calls on CPU ranks may be: functions entered, so that no busy machine decides."""

from __future__ import annotations

import pytest

from campaigns.host.host_path import PLANS, _entered, cpu_calls
from overweave.memory.board.records import Pause

MOST_NAMED, MOST_CHOSEN = 5_500, 6_500  # two fifths, and less than half, of what commit 8e3f1c9 entered
MOST_WARM = 200
MOST_FILES = 95


@pytest.mark.parametrize("plan", PLANS)
def test_calls_enter_few_functions(plan: str | None):
    """MEASURED: 13,700 cold in either way at commit 8e3f1c9, most of them for rows of tables that nobody asked for."""
    most, found = MOST_CHOSEN if plan is None else MOST_NAMED, cpu_calls(plan)
    assert found.cold.total() <= most, found.cold.most_common()
    assert plan is None or not found.cold["table.py"]
    assert found.warm <= MOST_WARM
    assert found.files <= MOST_FILES


def looked(times: int) -> int:
    """How many functions are entered by a loop that waits, and looks `times` in vain."""
    left = times

    def look() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    def wait() -> None:
        pause = Pause()
        while look():
            pause()

    return _entered(wait).total()


def test_looks_in_vain_are_not_counted():
    assert looked(1) == looked(30) == 2  # `wait`, and the look that found something
