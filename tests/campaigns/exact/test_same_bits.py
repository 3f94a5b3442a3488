"""Two checkouts are compared case by case; here the second is this one, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.exact.same_bits import PLANS, TILES, cases, compared, digests
from tests.source_tree import ROOT


def test_a_bit_that_differs_on_one_rank_is_told():
    old = [{"a": "1", "b": "2", "c": "3", "d": "refused: x"}] * 2
    new = [
        {"a": "1", "b": "2", "c": "refused: gone", "d": "refused: y"},
        {"a": "1", "b": "9", "c": "refused: gone", "d": "4"},
    ]
    differing, missing, same = compared(old, new)
    assert differing == ["b"]
    assert missing == {"c": "new refused: gone", "d": "old refused: x"}
    assert same == 1


def test_every_plan_stands_in_the_matrix_with_integers_and_floats():
    found = {(case.operator, case.is_integer) for case in cases(TILES)}
    assert found == {(operator, is_integer) for operator in PLANS for is_integer in (False, True)}


@pytest.mark.slow
def test_a_checkout_computes_what_it_computes():
    first, second = digests(Path(ROOT), 2, "all_gather_matmul.push"), digests(Path(ROOT), 2, "all_gather_matmul.push")
    assert compared(first, second)[::2] == ([], len(first[0]))
