"""Which Plan a problem gets, until the tuner measures: a rule by size, and the reasons, which `explain` tells.

The library path is always a candidate: where overlap loses, or a kernel cannot address the operands, the rule says so
and takes it. Nothing falls back silently.
"""

from __future__ import annotations

from msgspec import Struct

from overweave.ir.plan import ITEMSIZE_BYTES, Problem

DESCRIPTOR_BYTES = 16  # bulk-tensor rows start at multiples of this


class Target(Struct, frozen=True):
    """What a plan will run on. is_hopper: sm_90."""

    kind: str
    sms: int = 132
    is_hopper: bool = True


class Choice(Struct, frozen=True):
    """A schedule of the catalog with its options, why it was taken, and what was not taken and why."""

    plan: str
    options: dict[str, str | int]
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        options = " ".join(f"-o {name}={value}" for name, value in self.options.items())
        lines = [f"{self.plan} {options}".rstrip(), f"  because {self.reason}"]
        lines += [f"  not {name}: {why}" for name, why in self.rejected]
        return "\n".join(lines)


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
        work = 2.0 * problem.m * problem.n * problem.k
        return work / self.tflops / 1e6 + wire_bytes(problem) / self.wire_gb_per_s / 1e3


# MEASURED: own_pieces 1, 2, 4 give 613.5, 606.3, 605.2 us, geometric mean over mlp, W=4 (4 x H200, 2026-11-20).
RULES = {
    "all_gather_matmul": SizeRule("push", "per_shard", {}),
    "matmul_reduce_scatter": SizeRule("scatter", "sequential", {"own_pieces": 4}),
}


def choose(problem: Problem, target: Target) -> Choice:
    """The plan for a problem on a target, with reasons."""
    rule = RULES[problem.operator]
    overlapped, sequential = f"{problem.operator}.{rule.overlapped}", f"{problem.operator}.sequential"
    if problem.world_size == 1:
        return Choice(sequential, {}, "a group of one has nothing to overlap")
    too_small = _too_small(problem, rule) if target.kind != "cpu" else ""
    if too_small:
        return Choice(sequential, {}, "the plain library calls win at this size", ((overlapped, too_small),))
    obstacle = kernel_obstacle(problem, target)
    if obstacle:
        why = "library matmuls take any layout"
        return Choice(f"{problem.operator}.{rule.without_kernel}", {}, why, ((overlapped, obstacle),))
    if target.kind == "cpu":
        return Choice(overlapped, {}, "on the CPU the overlapped schedule is emulated, whatever the size")
    options = tile_options(target) | rule.options
    return Choice(overlapped, options, "copies hide behind the tiles of one kernel")


def tile_options(target: Target) -> dict[str, str | int]:
    """Options that every plan with a tile kernel takes on a target."""
    if target.kind == "cpu":
        return {}
    return {"kernel": "hopper" if target.is_hopper else "portable", "sms": target.sms, "pieces": 1}


def kernel_obstacle(problem: Problem, target: Target) -> str:
    """Why the tile kernels cannot, or should not, compute a problem; empty if they can."""
    if problem.dtype == "float32" and target.kind == "cuda":
        return "fp32 without TF32 runs outside the tensor cores, where the library's matmul is faster"
    step = DESCRIPTOR_BYTES // ITEMSIZE_BYTES[problem.dtype]
    if problem.k % step or problem.n % step:
        return f"n={problem.n} and k={problem.k} must be multiples of {step}: rows must start at multiples of 16 bytes"
    return ""


def wire_bytes(problem: Problem) -> int:
    """What one rank receives: all rows but its own, of the input (gather) or of the partial sums (scatter)."""
    columns = problem.k if problem.operator == "all_gather_matmul" else problem.n
    return problem.m * columns * ITEMSIZE_BYTES[problem.dtype] * (problem.world_size - 1) // problem.world_size


def _too_small(problem: Problem, rule: SizeRule) -> str:
    predicted_us = rule.predicted_us(problem)
    if predicted_us >= rule.sequential_us:
        return ""
    return f"the plain calls take about {predicted_us:.0f} us, and overlap pays from {rule.sequential_us:.0f} us on"
