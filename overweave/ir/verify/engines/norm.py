"""Whether a plan norms every row of its result, once, and only where the whole row is: what its engines must be."""

from __future__ import annotations

from overweave.ir.plan import LIBRARY, PACKED_KERNEL, PACKED_SUMS, REDUCE_KERNEL, Plan
from overweave.ir.schedule import OUTPUT, Collective, Compute, Operation, Range, Reduce, Region
from overweave.ir.verify.verdict import Findings


def check_norm(plan: Plan, findings: Findings) -> None:
    """Rows of the output come from sums of whole rows, by the reduction kernel, a packed one that adds, or the
    library; nothing else norms."""
    sums = plan.realization.reduction
    if sums is not None and (sums.parts > sums.block_n or (plan.problem.norm is None and sums.parts > 1)):
        findings.add(
            "form", None, f"a tile of {sums.block_n} columns in {sums.parts} parts: only rows to norm have any"
        )
    if plan.problem.norm is None:
        return
    outputs = {buffer.name for buffer in plan.schedule.buffers if buffer.home == OUTPUT}
    normed: dict[int, list[Range]] = {}
    for operation in plan.schedule.operations:
        for region in operation.writes:
            if region.buffer in outputs and not region.is_empty:
                obstacle = _obstacle(plan, operation, region)
                if obstacle:
                    findings.add("form", operation, f"rows of the normed output: {obstacle}", region)
                elif _norms(plan, operation):
                    normed.setdefault(region.rank, []).append(region.rows)
    for rank, rows in normed.items():
        rows.sort()
        if any(one[1] > other[0] for one, other in zip(rows, rows[1:], strict=False)):
            findings.add("form", None, f"rank {rank} norms a row twice")


def _norms(plan: Plan, operation: Operation) -> bool:
    """Whether rows are normed behind it: a product of a group of several is a part of a sum."""
    return not isinstance(operation, Compute) or plan.schedule.world_size == 1


def _obstacle(plan: Plan, operation: Operation, region: Region) -> str:
    cols = plan.schedule.buffer(region.buffer).cols
    engine = plan.realization.engine_of(operation.queue)
    if region.cols != (0, cols):
        return f"columns [{region.cols[0]}:{region.cols[1]}] are no whole row"
    if isinstance(operation, Reduce) and engine == REDUCE_KERNEL:
        config = plan.realization.reduction
        block_n = config.block_n if config else 0
        return "" if block_n >= cols else f"a tile of {block_n} columns holds no row of {cols}"
    if engine == PACKED_KERNEL and plan.realization.packed:
        exchange = plan.realization.packed.exchange
        return "" if exchange in PACKED_SUMS else f"a packed {exchange} does not norm"
    if engine == LIBRARY and isinstance(operation, Reduce | Collective | Compute):
        return ""
    return f"the {engine} that writes them does not norm"
