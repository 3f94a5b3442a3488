"""The rule by size: the plan where no machine is described, and on CPUs, which emulate schedules.

The library path is a candidate here too: it is taken where overlap loses, or a kernel cannot address the operands.
"""

from __future__ import annotations

from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.problem import Problem
from overweave.tuner.model.choice import Choice, make_choice
from overweave.tuner.space.space import candidate, library_path, reason_unsupported
from overweave.tuner.space.target import Target

# The least time of the plain calls at which overlap pays, and the rates of cuBLAS and NCCL for that estimate.
# MEASURED: eager calls of 256 to 8,192 rows of Llama-3 and mlp layers, W=4 (4 x H200, 2026-11-20): below about 115 us
# the overlapped plan's launches and flags cost more than the overlap gains.
PAYS_FROM_US, TFLOPS, WIRE_GB_PER_S = 115.0, 650.0, 250.0


def default_plan(problem: Problem, target: Target) -> Choice:
    """Return the plan for a problem on a target, with reasons."""
    rule = problem.record.size_rule
    sequential, overlapped = library_path(problem.operator), f"{problem.operator}.{rule.overlapped}"
    too_small = _too_small(problem) if target.kind != "cpu" else ""
    if too_small:
        why = "the plain library calls win at this size"
        return make_choice(problem, target, sequential, ("rule", why), ((overlapped, too_small),))
    if why_not := reason_unsupported(problem, target, candidate(rule.overlapped, {})):
        taken, why = candidate(rule.without_kernel, {}), "library matmuls take any layout"
        return make_choice(problem, target, taken, ("rule", why), ((overlapped, why_not),))
    if target.kind == "cpu":
        why = "on the CPU the overlapped schedule is emulated, whatever the size"
        return make_choice(problem, target, candidate(rule.overlapped, {}), ("rule", why))
    why = "copies hide behind the tiles of one kernel"
    return make_choice(problem, target, candidate(rule.overlapped, rule.options), ("rule", why))


def wire_bytes(problem: Problem) -> int:
    """Return the bytes that one rank receives: all moved rows but its own; of an all-reduce twice, as parts and as
    sums."""
    rows = problem.m * (2 if problem.record.shares_sums else 1)
    moved = rows * problem.moved_columns * ITEMSIZE_BYTES[problem.moved_dtype]
    return moved * (problem.world_size - 1) // problem.world_size


def predicted_us(problem: Problem) -> float:
    """Return the time of one cuBLAS matmul and one NCCL collective in sequence."""
    work = 2.0 * problem.m * problem.multiplied_columns * problem.k
    return work / TFLOPS / 1e6 + wire_bytes(problem) / WIRE_GB_PER_S / 1e3


def _too_small(problem: Problem) -> str:
    """Return why overlap does not pay; "" if it does."""
    plain_us = predicted_us(problem)
    if plain_us >= PAYS_FROM_US:
        return ""
    return f"the plain calls take about {plain_us:.0f} us, and overlap pays from {PAYS_FROM_US:.0f} us on"
