from __future__ import annotations

import pytest

from overweave.tuner.measure.bench import Roofs, measure

ROOFS = Roofs(matmul_us=315, communication_us=190, sequential_us=498, ceiling_us=321)


def test_the_ends_of_the_scale():
    assert measure(315, ROOFS).overlap_efficiency == 1.0
    assert measure(498, ROOFS).overlap_efficiency == 0.0
    assert measure(505, ROOFS).overlap_ratio == 0.0
    assert measure(321, ROOFS).ceiling_fraction == 1.0


def test_a_published_row():
    """The sketch of all-gather + matmul 8192x4096x14336: 342 us, efficiency 0.85."""
    assert measure(342, ROOFS).overlap_efficiency == pytest.approx(0.85, abs=0.005)
    assert measure(342, ROOFS).exposed_us == 27


def test_losses_are_negative():
    slower = measure(600, ROOFS)
    assert slower.overlap_efficiency < 0
    assert slower.overlap_ratio < 0


def test_what_cannot_be_said_is_none():
    nothing = measure(100, Roofs(matmul_us=100, communication_us=0, sequential_us=100))
    assert (nothing.overlap_efficiency, nothing.overlap_ratio, nothing.ceiling_fraction) == (None, None, None)
