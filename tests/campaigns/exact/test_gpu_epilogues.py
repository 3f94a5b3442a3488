"""What GPU campaigns compare with, tried on CPU ranks: the library is right by it, and a wrong element is noticed."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from campaigns.cases import IN_KERNELS, OPERATORS
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


SHORT = "matmul_reduce_scatter"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize(
    "operator", [each if each == SHORT else pytest.param(each, marks=pytest.mark.nightly) for each in OPERATORS]
)
def test_every_form_in_every_method_is_right_on_cpu_ranks(operator: str, world_size: int):
    for count, wrong in run_ranks(tried, world_size, operator, False, timeout_s=120):
        assert count > 100
        assert wrong == []


@pytest.mark.slow
def test_a_single_wrong_element_is_noticed():
    for count, wrong in run_ranks(tried, 2, "all_reduce.sequential", True, timeout_s=60):
        assert len(wrong) == count > 10
