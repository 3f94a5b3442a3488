"""Sums over slots: the op, its gradient, and its kernel under the interpreter."""

from __future__ import annotations

import pytest
import torch

from overweave.moe.slots import ordered_sum
from tests import forked


def test_what_has_no_expert_is_not_added():
    z = torch.tensor([[1.0, 2.0], [5.0, 6.0], [7.0, 8.0], [float("nan"), 4.0]]).requires_grad_()
    places, offsets = torch.tensor([0, 3, 2, 1], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32)
    weights = torch.tensor([[2.0, float("nan")], [1.0, 3.0]]).requires_grad_()
    y = ordered_sum(z, places, offsets, weights, 2)
    assert torch.equal(y, torch.tensor([[2.0, 4.0], [22.0, 26.0]]))
    y.sum().backward()
    assert torch.equal(z.grad[:3], torch.tensor([[2.0, 2.0], [3.0, 3.0], [1.0, 1.0]]))  # type: ignore[index]
    assert torch.equal(weights.grad, torch.tensor([[3.0, 0.0], [15.0, 11.0]]))  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_kernel_adds_the_same():
    done = forked.run("-m", "tests.moe.interpreted_slots")
    assert done.stdout == "0 wrong\n", done.stderr
