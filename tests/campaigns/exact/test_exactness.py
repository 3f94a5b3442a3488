"""The exactness campaign, cut short; and that it would notice."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from campaigns.exact import exactness
from tests.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("world_size", exactness.WORLDS)
def test_random_shapes(world_size: int):
    assert run_ranks(exactness.try_shapes, world_size, "library", 12, 1, timeout_s=120) == [[]] * world_size


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 8])
def test_successive_calls_with_a_late_rank(world_size: int):
    assert run_ranks(exactness.try_calls, world_size, "library", 200, 2, timeout_s=120) == [[]] * world_size


def try_spoiled(count: int) -> list[str]:
    honest = exactness.compute

    def spoiled(*arguments: Any) -> torch.Tensor:
        result = honest(*arguments)
        result[:1, :1] += 1
        return result

    with patch.object(exactness, "compute", spoiled):
        return exactness.try_shapes("library", count, 3)


@pytest.mark.slow
def test_a_single_wrong_element_is_noticed():
    wrong = [line for told in run_ranks(try_spoiled, 2, 6) for line in told]
    assert sum("not bit-equal" in line for line in wrong) >= 6
