"""Curves of measured points: what a transfer reaches by its size, and loads and stores by the SMs that make them.

Between its points time grows linearly with size, so a curve is as good as its points and no constant hides a fit.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from msgspec import Meta, Struct

# Farther apart than anything that was measured, and near enough that no time is endless and no sum of them infinite.
Positive = Annotated[float, Meta(ge=1e-9, le=1e18)]
Points = Annotated[tuple[tuple[Positive, Positive], ...], Meta(min_length=1, max_length=1000)]


class Bandwidth(Struct, frozen=True, forbid_unknown_fields=True):
    gb_per_s: Positive
    source: str


class Curve(Struct, frozen=True, forbid_unknown_fields=True):
    """Points (bytes, GB/s), growing in bytes, of one transfer in a busy queue: launch excluded."""

    points: Points
    source: str

    def time_us(self, size_bytes: float) -> float:
        """Time of a transfer. Below the first point its time is a floor, beyond the last its rate holds."""
        return interpolated_us(self.points, size_bytes)

    @property
    def peak_gb_per_s(self) -> float:
        return max(rate for _, rate in self.points)


class SmCurve(Struct, frozen=True, forbid_unknown_fields=True):
    """Points (SMs, GB/s), growing in SMs, of loads and stores between GPUs by a kernel on so many SMs."""

    points: Points
    source: str

    def gb_per_s(self, sms: int) -> float:
        """In proportion below the first point, linear between points, constant beyond the last."""
        known = ((0.0, 0.0), *self.points)
        for (low, low_rate), (high, high_rate) in pairwise(known):
            if sms <= high:
                return low_rate + (high_rate - low_rate) * (sms - low) / (high - low)
        return known[-1][1]


def interpolated_us(points: Points, size_bytes: float) -> float:
    """Time of a transfer, linear in bytes between `points` (bytes, GB/s). 1 GB/s is 1e3 bytes/us."""
    times = [(size, size / rate / 1e3) for size, rate in points]
    if size_bytes <= times[0][0]:
        return times[0][1]
    for (low, low_us), (high, high_us) in pairwise(times):
        if size_bytes <= high:
            return low_us + (high_us - low_us) * (size_bytes - low) / (high - low)
    return times[-1][1] * size_bytes / times[-1][0]
