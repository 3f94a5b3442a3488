"""Scales as a library takes them."""

from __future__ import annotations

import torch

from overweave.runtime.library.scaled import SCALES_BYTES, aligned


def test_scales_lie_where_the_library_takes_them():
    both = torch.tensor([2.0, 3.0])
    for one in both.split(1):
        assert aligned(one).data_ptr() % SCALES_BYTES == 0
        assert torch.equal(aligned(one), one)
    assert aligned(both) is both
