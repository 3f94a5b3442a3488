"""The campaign of overlap ratios, on its longest sequence, and what it would say of broken promises."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from campaigns.rates import attention_overlap
from campaigns.rates.attention_overlap import rows, verdicts
from overweave.attention.routes import SLOTS


@pytest.mark.slow
def test_promises_hold_of_eight_ranks():
    found = [row for row in rows("h200x8", [8], "Attn-1") if row.found.case.tokens == 131072]
    told = list(verdicts(found))
    assert [each.holds for each in told if each.holds is not None] == [True, True]
    assert "per_shard" in str(found[0])
    with patch.object(attention_overlap, "BALANCED", 1.9):
        assert not all(each.holds is not False for each in verdicts(found))


def test_a_ring_of_more_places_breaks_its_promise():
    (told,) = attention_overlap._memory(8)
    assert told.holds
    assert f"{SLOTS:.2f}" == told.found
    with patch("overweave.attention.rings.SLOTS", 3):
        (told,) = attention_overlap._memory(8)
        assert told.holds is False
