"""Statistics of samples beyond Python's: plain arithmetic on lists.

Samples of several methods are taken in rounds, so that slow changes (clocks, heat, other users) affect all methods of a
round alike. Ratios are therefore formed within rounds, and the interval of their median comes from order statistics,
without assumptions about the distribution.
SOURCE: Le Boudec, "Performance Evaluation", 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import geometric_mean, median, quantiles

from msgspec import Struct

from overweave.errors import InputError

__all__ = ["Ratio", "geometric_mean", "interval_rank", "median", "p90", "paired_ratio"]
CONFIDENCE = 0.95


class Ratio(Struct, frozen=True):
    """A median of paired ratios and the interval that holds the true median with 95 % confidence."""

    value: float
    low: float
    high: float


def p90(values: Sequence[float]) -> float:
    """Return the 90th percentile, interpolated between neighbours."""
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return the median of `above[i] / below[i]` over rounds, with its interval."""
    if len(above) != len(below):
        raise InputError(
            "paired_ratio", f"{len(above)} samples against {len(below)}", "Pair samples of the same rounds"
        )
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    skip = interval_rank(len(ratios))
    return Ratio(median(ratios), ratios[skip], ratios[len(ratios) - 1 - skip])


def interval_rank(samples: int) -> int:
    """Return how many of the smallest and of the largest ordered samples lie outside the interval of the median.

    Each sample falls below the median with probability one half, so the count below it is binomial, and leaving out
    `skip` on each side misses the median with twice the probability of at most `skip` below it. With fewer than six
    samples no interval reaches 95 %: then the whole range is returned.
    """
    skip, at_most_skip = 0, 0.5**samples
    while 2 * (at_most_skip + math.comb(samples, skip + 1) * 0.5**samples) <= 1 - CONFIDENCE:
        skip += 1
        at_most_skip += math.comb(samples, skip) * 0.5**samples
    return skip
