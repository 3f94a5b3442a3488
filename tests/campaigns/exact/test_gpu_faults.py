"""The campaign of faults on GPUs, short: fewer cases lose a rank, but not all of one kind."""

from __future__ import annotations

import pytest

from campaigns.exact.gpu_faults import CASES
from campaigns.gpu_ranks import spread_over


@pytest.mark.parametrize("count", [0, 1, 3, len(CASES), len(CASES) + 5])
def test_cases_are_spread_over_all(count):
    chosen = spread_over(CASES, count)
    assert len(chosen) == min(count, len(CASES)) == len(set(chosen))
    assert chosen == [case for case in CASES if case in chosen]


def test_three_cases_are_of_every_operator():
    assert len({case.operator for case in spread_over(CASES, 3)}) >= 2
