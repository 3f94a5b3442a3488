"""The rule by size: what is taken where no machine is described, and the CPU's schedules are emulated.

The library path is a candidate here too: where overlap loses, or a kernel cannot address the operands, it is taken.
"""

from __future__ import annotations

from msgspec import Struct

from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import Problem
from overweave.tuner.choice import Choice, chosen
from overweave.tuner.space import SEQUENTIAL, candidate
from overweave.tuner.target import Target, kernel_obstacle, weights_obstacle


class SizeRule(Struct, frozen=True):
    """The overlapped plan of an operator, its options on a GPU, and how long the plain calls must take for it to pay.

    without_kernel: the plan where no tile kernel can run. A scatter of library matmuls would be summed by library
    passes over memory, hardly faster than NCCL. MEASURED: 0.96 to 1.04 times, mlp, W=4 (4 x H200, 2026-11-20).

    MEASURED: eager calls of 256 to 8,192 rows of Llama-3 and mlp layers, W=4 (4 x H200, 2026-11-20): below about
    115 us the overlapped plan's launches and flags cost more than the overlap gains. The two rates are those of cuBLAS
    and NCCL on the same machine.
    """

    overlapped: str
    without_kernel: str
    options: dict[str, str | int]
    sequential_us: float = 115.0
    tflops: float = 650.0
    wire_gb_per_s: float = 250.0

    def predicted_us(self, problem: Problem) -> float:
        """How long one library matmul and one library collective take, after one another."""
        work = 2.0 * problem.m * problem.multiplied_columns * problem.k
        return work / self.tflops / 1e6 + wire_bytes(problem) / self.wire_gb_per_s / 1e3


# MEASURED: own_pieces 1, 2, 4 give 613.5, 606.3, 605.2 us, geometric mean over mlp, W=4 (4 x H200, 2026-11-20).
RULES = {
    "all_gather_matmul": SizeRule("push", "per_shard", {}),
    "matmul_reduce_scatter": SizeRule("scatter", "sequential", {"own_pieces": 4}),
    "matmul_all_reduce": SizeRule("two_shot", "sequential", {}),
}


def by_size(problem: Problem, target: Target) -> Choice:
    """The plan for a problem on a target, with reasons."""
    rule = RULES[problem.operator]
    sequential, overlapped = candidate(SEQUENTIAL, {}), f"{problem.operator}.{rule.overlapped}"
    too_small = _too_small(problem, rule) if target.kind != "cpu" else ""
    if too_small:
        why = "the plain library calls win at this size"
        return chosen(problem, target, sequential, ("rule", why), ((overlapped, too_small),))
    obstacle = kernel_obstacle(problem, target) or weights_obstacle(problem)
    if obstacle:
        taken, why = candidate(rule.without_kernel, {}), "library matmuls take any layout"
        return chosen(problem, target, taken, ("rule", why), ((overlapped, obstacle),))
    if target.kind == "cpu":
        why = "on the CPU the overlapped schedule is emulated, whatever the size"
        return chosen(problem, target, candidate(rule.overlapped, {}), ("rule", why))
    why = "copies hide behind the tiles of one kernel"
    return chosen(problem, target, candidate(rule.overlapped, rule.options), ("rule", why))


def wire_bytes(problem: Problem) -> int:
    """What one rank receives: all rows but its own, of the input (gather), of the partial sums (scatter), or both of
    partial and of whole sums (all-reduce).
    """
    columns = problem.k if problem.operator == "all_gather_matmul" else problem.n
    rows = problem.m * (2 if problem.operator == "matmul_all_reduce" else 1)
    return rows * columns * ITEMSIZE_BYTES[problem.moved_dtype] * (problem.world_size - 1) // problem.world_size


def _too_small(problem: Problem, rule: SizeRule) -> str:
    predicted_us = rule.predicted_us(problem)
    if predicted_us >= rule.sequential_us:
        return ""
    return f"the plain calls take about {predicted_us:.0f} us, and overlap pays from {rule.sequential_us:.0f} us on"
