"""Scales as a library takes them."""

from __future__ import annotations

import torch

from overweave.runtime.library.epilogue import SCALES_BYTES, align_scales


def test_scales_lie_where_the_library_takes_them():
    both = torch.tensor([2.0, 3.0])
    for one in both.split(1):
        assert align_scales(one).data_ptr() % SCALES_BYTES == 0
        assert torch.equal(align_scales(one), one)
    assert align_scales(both) is both
