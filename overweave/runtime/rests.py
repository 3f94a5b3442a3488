"""How long tiles of the Hopper kernel rest between the strips that they store at peers (kernels/stored_hopper.py)."""

from __future__ import annotations

from collections.abc import Iterable

from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import Problem
from overweave.ir.schedule import Compute

STEP_BYTES = 128  # of a row of an operand
# For each such step of k: half of what a tile takes for it, by its strips, of which one of 128 x 256 columns has 32.
# MEASURED: 0.66 us (STEP_US in schedules/tile_shape.py).
REST_NS = 10
LEAST_WAVES = 1.5


def rest_ns(problem: Problem, computes: Iterable[Compute], waves: float) -> int:
    """All SMs end their first tiles together, and what they load next waits for what they store: so the strips of a
    tile are spread over half of the time that the next one takes. waves: of tiles, in each shard.

    The time follows from k. It is not measured, as a tile that waits for a peer would rest all the longer, and let the
    next rank wait. And there is none where it costs more than it saves. MEASURED: on four H200s, in turns
    (benchmarks/results/rests.h200x4.2026-11-22.txt; `campaigns.gpu_rests` times them again):

    - a shard has no second wave: the next rank of a ring waits for each tile. 286 us, and 219 without.
    - a sum goes to several peers: the link is the bound by then. 1,503 us, and 1,427 without; 788 and 717.
    """
    spreads = any(len(compute.copies) > 1 for compute in computes)
    if spreads or waves < LEAST_WAVES:
        return 0
    return rest_of(problem, REST_NS)


def rest_of(problem: Problem, step_ns: int) -> int:
    """Behind a strip, by what it is for each step of k."""
    return problem.k * ITEMSIZE_BYTES[problem.dtype] // STEP_BYTES * step_ns
