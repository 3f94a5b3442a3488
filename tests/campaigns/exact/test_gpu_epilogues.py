"""What GPU campaigns compare with, tried on CPU ranks: the library is right by it, and a wrong element is noticed."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from campaigns.cases import IN_KERNELS
from campaigns.exact import calls, gpu_epilogues
from campaigns.exact.calls import FORMS
from campaigns.exact.gpu_epilogues import outcomes
from tests.ranks import run_ranks

SMALL = ((37, 304, 80),)  # m, n, k


def tried(only: str, spoils: bool) -> tuple[int, list[str]]:
    """How many calls were made, and what was wrong with them."""
    told: list[str] = []
    honest = calls.results

    def results(*given: object) -> tuple[torch.Tensor, ...]:
        found = honest(*given)  # type: ignore[arg-type]
        if spoils:
            found[-1][:1, :1] += 1
        return found

    with (
        patch.object(gpu_epilogues, "results", results),
        patch.object(gpu_epilogues, "captured", lambda call: call),
        patch.object(gpu_epilogues, "sharers", lambda: 1),
        patch.object(gpu_epilogues, "NORMED_SIZES", SMALL),
    ):
        for named in IN_KERNELS:
            if only in f"{named.operator}.{named.plan}":
                told += outcomes(named, FORMS, 1, SMALL)
    return len(told), [each for each in told if each]


@pytest.mark.slow
def test_a_single_wrong_element_is_noticed():
    for count, wrong in run_ranks(tried, 2, "all_reduce.sequential", True, timeout_s=60):
        assert len(wrong) == count > 10
