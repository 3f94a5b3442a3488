"""The rule by size: what is taken where no machine is described, and the CPU's schedules are emulated.

The library path is a candidate here too: where overlap loses, or a kernel cannot address the operands, it is taken.
"""

from __future__ import annotations

from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.problem import Problem
from overweave.tuner.model.choice import Choice, chosen
from overweave.tuner.space.space import candidate, library_path, obstacle
from overweave.tuner.space.target import Target

# How long the plain calls must take for overlap to pay, and the rates of cuBLAS and NCCL by which that is told.
# MEASURED: eager calls of 256 to 8,192 rows of Llama-3 and mlp layers, W=4 (4 x H200, 2026-11-20): below about 115 us
# the overlapped plan's launches and flags cost more than the overlap gains.
PAYS_FROM_US, TFLOPS, WIRE_GB_PER_S = 115.0, 650.0, 250.0


def by_size(problem: Problem, target: Target) -> Choice:
    """The plan for a problem on a target, with reasons."""
    rule = problem.record.size_rule
    sequential, overlapped = library_path(problem.operator), f"{problem.operator}.{rule.overlapped}"
    too_small = _too_small(problem) if target.kind != "cpu" else ""
    if too_small:
        why = "the plain library calls win at this size"
        return chosen(problem, target, sequential, ("rule", why), ((overlapped, too_small),))
    if why_not := obstacle(problem, target, candidate(rule.overlapped, {})):
        taken, why = candidate(rule.without_kernel, {}), "library matmuls take any layout"
        return chosen(problem, target, taken, ("rule", why), ((overlapped, why_not),))
    if target.kind == "cpu":
        why = "on the CPU the overlapped schedule is emulated, whatever the size"
        return chosen(problem, target, candidate(rule.overlapped, {}), ("rule", why))
    why = "copies hide behind the tiles of one kernel"
    return chosen(problem, target, candidate(rule.overlapped, rule.options), ("rule", why))


def wire_bytes(problem: Problem) -> int:
    """What one rank receives: all rows but its own, of what travels; where sums are shared, of parts and of sums."""
    rows = problem.m * (2 if problem.record.shares_sums else 1)
    moved = rows * problem.moved_columns * ITEMSIZE_BYTES[problem.moved_dtype]
    return moved * (problem.world_size - 1) // problem.world_size


def predicted_us(problem: Problem) -> float:
    """How long one library matmul and one library collective take, after one another."""
    work = 2.0 * problem.m * problem.multiplied_columns * problem.k
    return work / TFLOPS / 1e6 + wire_bytes(problem) / WIRE_GB_PER_S / 1e3


def _too_small(problem: Problem) -> str:
    plain_us = predicted_us(problem)
    if plain_us >= PAYS_FROM_US:
        return ""
    return f"the plain calls take about {plain_us:.0f} us, and overlap pays from {PAYS_FROM_US:.0f} us on"
