"""What GPU campaigns try with a call, tried on CPU ranks: a right call passes, and a wrong element is noticed."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from campaigns.exact import trials
from campaigns.exact.calls import Case
from campaigns.exact.gpu_exactness import loud, unequal
from campaigns.exact.trials import Tensors, Trial, long_run, of_case
from tests.ranks import run_ranks

CASE = Case("matmul_reduce_scatter", 37, 304, 80, plan="scatter")


def trial(spoils: bool) -> Trial:
    honest = of_case(CASE)

    def spoiled(given: Tensors) -> torch.Tensor:
        found = honest.run(given)
        found[:1, :1] += 1
        return found

    return honest._replace(run=spoiled) if spoils else honest


def tried(spoils: bool) -> list[str]:
    without_gpu = patch.multiple(torch.cuda, synchronize=lambda: None, _sleep=lambda cycles: None)
    with without_gpu, patch.object(trials, "captured", lambda call: call):
        return [each for is_replayed in (False, True) for each in long_run(trial(spoils), 12, is_replayed)]


@pytest.mark.slow
def test_a_right_call_passes_and_a_wrong_element_is_noticed():
    assert run_ranks(tried, 2, False) == [[], []]
    assert run_ranks(tried, 2, True) == [["12 differ", "12 differ"]] * 2


def compared() -> list[str]:
    shapes = (Case("all_gather_matmul", 70, 96, 64, plan="push"), Case("matmul_all_reduce", 70, 96, 64))
    return [unequal(case, 1) + loud(case, 1) for case in shapes]


def test_results_are_compared_in_bits_and_in_error():
    assert run_ranks(compared, 2) == [["", ""]] * 2
