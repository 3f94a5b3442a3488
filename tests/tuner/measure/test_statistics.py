from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overweave.errors import InputError
from overweave.tuner.measure.timer import geometric_mean, interval_rank, median, p90, paired_ratio

TIMES = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=60)


def test_quantiles_interpolate_between_samples():
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5
    assert p90(range(11)) == 9
    assert p90([5.0]) == 5.0


def test_geometric_mean_balances_ratios():
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert geometric_mean([1.0, 8.0, 1.0]) == pytest.approx(2.0)


def misses(samples: int, skip: int) -> float:
    """Probability that the median lies outside when `skip` samples are left out on each side."""
    return 2 * sum(math.comb(samples, below) for below in range(skip + 1)) / 2**samples


@pytest.mark.parametrize("samples", [6, 10, 30, 31, 50, 100])
def test_the_interval_is_the_narrowest_that_keeps_the_confidence(samples):
    skip = interval_rank(samples)
    assert misses(samples, skip) <= 0.05 < misses(samples, skip + 1)


def test_few_samples_give_their_whole_range():
    ratio = paired_ratio([2.0, 4.0, 3.0], [1.0, 1.0, 1.0])
    assert (ratio.value, ratio.low, ratio.high) == (3.0, 2.0, 4.0)


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says():
    source = random.Random(7)
    covered = 0
    for _ in range(400):
        below = [source.lognormvariate(0, 0.3) for _ in range(30)]
        above = [1.25 * value * source.lognormvariate(0, 0.1) for value in below]
        ratio = paired_ratio(above, below)
        covered += ratio.low <= 1.25 <= ratio.high
    assert 0.92 <= covered / 400 <= 0.99


def test_pairing_cancels_what_a_round_has_in_common():
    drift = [1.0 + 0.1 * turn for turn in range(30)]
    ratio = paired_ratio([1.1 * value for value in drift], drift)
    assert ratio.value == pytest.approx(1.1)
    assert ratio.high - ratio.low < 1e-9
    assert ratio.low > 1.0


@given(TIMES)
@settings(deadline=None)  # a busy machine is no failure
def test_a_method_against_itself_is_one(times):
    ratio = paired_ratio(times, times)
    assert ratio.low == ratio.value == ratio.high == 1.0


@pytest.mark.slow
@given(TIMES, st.data())
@settings(deadline=None)  # a busy machine is no failure
def test_the_inverse_ratio_has_the_inverse_interval(times, data):
    others = data.draw(st.lists(st.floats(0.1, 1e6), min_size=len(times), max_size=len(times)))
    forth, back = paired_ratio(times, others), paired_ratio(others, times)
    assert back.low == pytest.approx(1 / forth.high)
    assert back.high == pytest.approx(1 / forth.low)


def test_bad_samples_are_refused():
    with pytest.raises(ValueError, match="no median"):
        median([])
    with pytest.raises(InputError):
        paired_ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="geometric mean"):
        geometric_mean([1.0, -1.0])
