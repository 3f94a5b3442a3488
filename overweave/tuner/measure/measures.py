"""Measures of how well an overlapped method hides its communication, as published, each one line of arithmetic.

All are formed from medians of one run of all methods, never from numbers of different runs.
"""

from __future__ import annotations

from msgspec import Struct


class Roofs(Struct, frozen=True, kw_only=True):
    """The times that a method is compared with, in microseconds.

    matmul_us: the fastest un-split matmul alone.           communication_us: NCCL's collective alone.
    sequential_us: that matmul and that collective, one after the other, as a user would write it.
    ceiling_us: the matmul beside an independent transfer of the same size on the copy engine, without any waits; None
    if there is no copy engine.
    """

    matmul_us: float
    communication_us: float
    sequential_us: float
    ceiling_us: float | None = None


class Measures(Struct, frozen=True, kw_only=True):
    """The measures of a method. Ratios have no unit; None if a roof is missing or a denominator is zero.

    exposed_us: effective communication time: the call's time beyond the matmul (Flux 5.1).
    overlap_efficiency: the part of the sequential method's communication that is hidden (Flux 5.1).
    overlap_ratio: the part of the collective's own time that is saved (TileLink 5).
    ceiling_fraction: 1 if the method is as fast as without any waits.
    """

    exposed_us: float
    overlap_efficiency: float | None
    overlap_ratio: float | None
    ceiling_fraction: float | None


def measure(time_us: float, roofs: Roofs) -> Measures:
    """Return the measures of a method that takes `time_us`. Negative ones are losses and are shown as such."""
    exposed_us = time_us - roofs.matmul_us
    hideable_us = roofs.sequential_us - roofs.matmul_us
    saved_us = roofs.matmul_us + roofs.communication_us - time_us
    return Measures(
        exposed_us=exposed_us,
        overlap_efficiency=1 - exposed_us / hideable_us if hideable_us > 0 else None,
        overlap_ratio=saved_us / roofs.communication_us if roofs.communication_us > 0 else None,
        ceiling_fraction=roofs.ceiling_us / time_us if roofs.ceiling_us is not None else None,
    )
