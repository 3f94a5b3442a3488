"""Curves of measured points: bandwidth of a transfer by its size, and of loads and stores by their number of SMs.

Between points time grows linearly with size; there is no fitted constant.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from msgspec import Meta, Struct

# Wider than any measured value, and narrow enough that no time and no sum of times is infinite.
Positive = Annotated[float, Meta(ge=1e-9, le=1e18)]
Points = Annotated[tuple[tuple[Positive, Positive], ...], Meta(min_length=1, max_length=1000)]


class Bandwidth(Struct, frozen=True, forbid_unknown_fields=True):
    gb_per_s: Positive
    source: str


class Curve(Struct, frozen=True, forbid_unknown_fields=True):
    """Points (bytes, GB/s), growing in bytes, of one transfer in a busy queue, without its launch."""

    points: Points
    source: str

    def time_us(self, size_bytes: float) -> float:
        """Return the time of a transfer. Below the first point its time holds, beyond the last its rate."""
        return interpolated_us(self.points, size_bytes)

    @property
    def peak_gb_per_s(self) -> float:
        return max(rate for _, rate in self.points)


class SmCurve(Struct, frozen=True, forbid_unknown_fields=True):
    """Points (SMs, GB/s), growing in SMs, of loads and stores between GPUs by a kernel on that many SMs."""

    points: Points
    source: str

    def gb_per_s(self, sms: int) -> float:
        """Return the bandwidth: in proportion below the first point, linear between points, constant beyond the
        last."""
        known = ((0.0, 0.0), *self.points)
        for (low, low_rate), (high, high_rate) in pairwise(known):
            if sms <= high:
                return low_rate + (high_rate - low_rate) * (sms - low) / (high - low)
        return known[-1][1]


def interpolated_us(points: Points, size_bytes: float) -> float:
    """Return the time of a transfer, linear in bytes between `points` (bytes, GB/s). 1 GB/s is 1e3 bytes/us."""
    times = [(size, size / rate / 1e3) for size, rate in points]
    if size_bytes <= times[0][0]:
        return times[0][1]
    for (low, low_us), (high, high_us) in pairwise(times):
        if size_bytes <= high:
            return low_us + (high_us - low_us) * (size_bytes - low) / (high - low)
    return times[-1][1] * size_bytes / times[-1][0]
