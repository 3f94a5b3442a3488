"""Whether the matmul of few rows can compute the products of a library queue in the place of cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.epilogue import NO_EPILOGUE
from overweave.ir.plan import LIBRARY, PACKED_KERNEL, Plan
from overweave.ir.schedule import Compute, Operation, Region
from overweave.ir.verify.rules.verdict import Findings

BYTES = 2  # of a number


def check_skinny(plan: Plan, findings: Findings) -> None:
    """Add refusals for products that it cannot compute, and for plans that do not launch it."""
    if plan.realization.skinny is None:
        return
    engines = {one.queue: one.engine for one in plan.realization.engines}
    if PACKED_KERNEL not in engines.values():
        findings.add("engine", None, "only plans of packed messages launch a matmul of few rows")
    if plan.problem.product_epilogue != NO_EPILOGUE or ITEMSIZE_BYTES[plan.realization.dtype] != BYTES:
        message = f"{plan.realization.dtype} and {plan.problem.product_epilogue}"
        findings.add("form", None, f"a matmul of few rows has 16-bit numbers and no epilogue, not {message}")
    for operation in plan.schedule.operations:
        if engines[operation.queue] == LIBRARY:
            for why in _faults(plan, operation):
                findings.add("engine", operation, why)


def _faults(plan: Plan, operation: Operation) -> Iterator[str]:
    """Yield why the kernel cannot run an operation."""
    if not isinstance(operation, Compute):
        yield f"a matmul of few rows in the place of cuBLAS leaves no engine for a {type(operation).__name__}"
        return
    if operation.accumulate or operation.beside or operation.finishes:
        yield "a matmul of few rows adds, scales and finishes nothing"
    parts = (*operation.a, operation.b, *operation.out)
    if len(parts) != 3 or not all(_is_whole(plan, part) for part in parts):
        yield "a matmul of few rows multiplies one whole buffer by another"


def _is_whole(plan: Plan, part: Region) -> bool:
    buffer = plan.schedule.buffer(part.buffer)
    return part.shape == (buffer.rows, buffer.cols)
