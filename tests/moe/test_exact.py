"""Layers of experts, tensor and expert parallel: the exactness campaign, cut short; and that it would notice."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from campaigns.exact import moe_exactness
from overweave.moe import pairs
from overweave.moe.slots import ordered_sum
from tests.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("part", moe_exactness.PARTS)
@pytest.mark.parametrize(("world_size", "count"), [(2, 5), (3, 3)])
def test_random_layers(world_size: int, count: int, part: str):
    assert run_ranks(moe_exactness.tried, world_size, part, count, world_size, timeout_s=120) == [[]] * world_size


@pytest.mark.nightly
@pytest.mark.parametrize("part", moe_exactness.PARTS)
@pytest.mark.parametrize("world_size", [1, 4, 8])
def test_more_random_layers(world_size: int, part: str):
    assert run_ranks(moe_exactness.tried, world_size, part, 20, 7, timeout_s=600) == [[]] * world_size


def tried_spoiled(part: str) -> list[str]:
    """With a sum over slots that forgets the last one."""

    def forgetful(z: torch.Tensor, places: Any, offsets: Any, weights: torch.Tensor | None, top: int) -> torch.Tensor:
        kept = torch.ones(len(places) // top, top)
        kept[:, max(1, top - 1) :] = 0.0
        return honest(z, places, offsets, kept if weights is None else kept * weights, top)

    honest = ordered_sum
    with patch.object(pairs, "ordered_sum", forgetful):  # as the second matmul asks for it
        return moe_exactness.tried(part, 5, 0)


@pytest.mark.slow
def test_a_lost_slot_is_noticed():
    assert all(run_ranks(tried_spoiled, 2, "tensor parallel"))
