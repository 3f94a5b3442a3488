"""What our matmul of few rows saves beside the library's, in a call of packed messages: as measured of a near layer.

Neither is predicted from rates: both read the weight once, and what the library leaves is latencies, by its choice of a
kernel for each size.
"""

from __future__ import annotations

from itertools import pairwise
from math import log2
from typing import NamedTuple

from overweave.ir.plan import Realization

FARTHEST = 2.0  # powers of two, of n and of k together: of layers beyond them nothing is known
ROWS = (1, 16, 64)


class Saved(NamedTuple):
    """Microseconds of a call, of a layer `n`, `k` of one rank, with as many rows as ROWS say."""

    n: int
    k: int
    us: tuple[float, float, float]


# MEASURED: four H200s, captured calls, benchmarks/results/packed_skinny.h200x4.2026-11-22.txt. Of sums, the mean of one
# shot and of two.
SAVED: dict[str, tuple[Saved, ...]] = {
    "early sum": (
        Saved(4096, 1024, (0.4, 0.2, -1.6)),
        Saved(4096, 3584, (3.6, 2.3, -1.1)),
        Saved(8192, 2048, (3.2, 1.1, -1.2)),
        Saved(8192, 7168, (2.0, 1.5, 0.3)),
    ),
    "sum": (
        Saved(4096, 1024, (-0.6, -0.9, -2.4)),
        Saved(4096, 3584, (2.4, 1.5, -2.0)),
        Saved(8192, 2048, (1.9, 0.6, -1.9)),
        Saved(8192, 7168, (0.8, 0.0, -0.7)),
    ),
    "early gather": (
        Saved(1536, 4096, (2.5, 1.0, 0.8)),
        Saved(7168, 4096, (3.4, 0.4, -0.7)),
        Saved(2560, 8192, (2.1, -0.4, -1.5)),
        Saved(14336, 8192, (7.1, 2.2, -10.3)),
    ),
    "gather": (
        Saved(1536, 4096, (1.3, 1.1, 0.2)),
        Saved(7168, 4096, (2.3, 0.5, -2.0)),
        Saved(2560, 8192, (1.2, 0.4, -1.2)),
        Saved(14336, 8192, (5.1, 1.7, -9.9)),
    ),
}


def saved_us(how: Realization, rows: int, n: int, k: int) -> float:
    """Of `[rows, k] @ [k, n]` in a plan that is realized so; 0 where the library multiplies, or no layer is near."""
    if how.skinny is None or how.packed is None or not rows:
        return 0.0
    kind = "gather" if how.packed.exchange == "gather" else "sum"
    known = SAVED[f"early {kind}" if how.skinny.early else kind]
    nearest = min(known, key=lambda one: _distance(one, n, k))
    return _between(rows, nearest.us) if _distance(nearest, n, k) <= FARTHEST else 0.0


def _distance(layer: Saved, n: int, k: int) -> float:
    return abs(log2(n / layer.n)) + abs(log2(k / layer.k))


def _between(rows: int, us: tuple[float, ...]) -> float:
    """By the logarithm of the rows; the last value beyond."""
    for (low, first), (high, last) in pairwise(zip(ROWS, us, strict=True)):
        if rows <= high:
            return first + (last - first) * log2(rows / low) / log2(high / low)
    return us[-1]
