"""The table of operators on CPU ranks, through their public functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from campaigns.cases import OPERATORS
from campaigns.exact.calls import Case
from tests.ops.table import EVERY, bare, faults, formed
from tests.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("cases", [bare, formed])
@pytest.mark.parametrize("world_size", EVERY)
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_plan(operator: str, world_size: int, cases: Callable[[str, int], list[Case]]):
    assert run_ranks(faults, world_size, cases(operator, world_size), timeout_s=200) == [[]] * world_size
