"""How far apart tiles of the Hopper kernel store their strips at peers (kernels/hopper/stored.py)."""

from __future__ import annotations

from collections.abc import Iterable

from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.problem import Problem
from overweave.ir.schedule import Compute
from overweave.ir.words import LEAST_WAVES

# With a strip of so many bytes from each SM so far apart, the link is full and no more.
# MEASURED: on two H200s, 16 rings (benchmarks/results/paces.h200x2.2026-11-22.txt): the quickest, or 1 % behind it
# where tiles are long; 75 ns less take up to 3 % more, 100 ns more up to 6 %.
STRIP_BYTES, PACE_NS = 2048, 700
# For each so many bytes of a row of an operand: half of what a tile takes for them, by its strips, of which one of
# 128 x 256 has 32. MEASURED: 0.69 us (STEP_US in schedules/tiles/shape.py).
STEP_BYTES, STEP_NS = 128, 10


def pace_ns(problem: Problem, computes: Iterable[Compute], waves: float, strip_bytes: int) -> int:
    """All SMs end their first tiles together, and what they load next waits for what they store: so the strips of a
    tile come no faster than the link takes them, and those of a long one are spread over half of the time that the next
    takes. waves: of tiles, in each shard. 0: as fast as they go.

    The time follows from k. It is not measured, as a tile that waits for a peer would take all the longer, and let the
    next rank wait. And there is none where it costs more than it saves. MEASURED: in turns, by an earlier rule
    (benchmarks/results/rests.h200x4.2026-11-22.txt; `campaigns.gpu_paces` times this one):

    - a shard has no second wave: the next rank of a ring waits for each tile. 286 us, and 219 without; on two, by this
      rule, 117 us and 107.
    - a sum goes to several peers: the link is the bound by then. 1,503 us, and 1,427 without; 788 and 717.
    """
    spreads = any(len(compute.copies) > 1 for compute in computes)
    if spreads or waves < LEAST_WAVES:
        return 0
    steps = problem.k * ITEMSIZE_BYTES[problem.dtype] // STEP_BYTES
    return max(PACE_NS, steps * STEP_NS) * strip_bytes // STRIP_BYTES
