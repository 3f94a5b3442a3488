"""Who multiplies which sizes; no GPU is needed."""

from __future__ import annotations

from campaigns.exact.gpu_odd_sizes import SIZES, library_why


def test_sizes_whose_rows_start_anywhere_are_the_librarys():
    whys = {size: library_why(*size) for size in SIZES}
    assert "n=2754" in whys[512, 2754, 4096]
    assert "nothing" in whys[64, 64, 0]
    assert whys[127, 131, 137]
    assert not whys[300, 24, 4104] + whys[7, 8, 64]
