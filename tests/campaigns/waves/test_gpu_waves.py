"""What is made of the times of matmuls that leave SMs free: no GPU is asked."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="no Triton here")
from campaigns.waves.gpu_waves import Timed, errors, lines

SHAPES = ((10, 4.0), (20, 4.0), (40, 7.5))  # waves with all SMs, microseconds of each


def timed(free: int, more_waves: int, factor: float) -> list[Timed]:
    found = [(waves + more_waves, us) for waves, us in SHAPES]
    return [Timed(free, waves, 5.0 + factor * waves * us, waves * us) for waves, us in found]


def test_lines_tell_what_is_fixed_from_what_waves_take():
    whole, left = timed(0, 0, 1.02), timed(16, 2, 0.95)
    found = dict(lines([*whole, *left]))
    assert set(found) == {0, 16}
    assert found[0] == pytest.approx((5.0, 1.02, 0.0), abs=1e-9)
    assert found[16] == pytest.approx((5.0, 0.95, 0.0), abs=1e-9)
    off = [left[0]._replace(us=1.1 * left[0].us), *left[1:]]
    assert dict(lines(off))[16].off > 0.01
    assert not dict(lines(whole[:1])), "no line through one point"


def test_errors_are_by_the_number_of_waves_alone():
    whole = Timed(0, 10, 100.0, 90.0)
    assert errors([whole, Timed(16, 12, 120.0, 108.0), Timed(32, 15, 120.0, 135.0)]) == pytest.approx([0.0, -0.2])
