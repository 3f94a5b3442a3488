"""Whether a plan applies RMSNorm, or the epilogue of sums, once and only where all of a row, or of a sum, is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter

from overweave.ir.plan import LIBRARY, PACKED_KERNEL, PACKED_SUMS, REDUCE_KERNEL, TILE_KERNEL, Plan
from overweave.ir.schedule import OUTPUT, Collective, Compute, Operation, Range, Reduce, Region
from overweave.ir.tensors import is_epilogue_applied
from overweave.ir.verify.rules.verdict import Findings

RankOutput = tuple[str, int]  # an output, and a rank
Normed = tuple[int, int, Operation]  # rows, and by whom


def check_norm(plan: Plan, findings: Findings) -> None:
    """Check which operations write the normed output.

    Its rows come from sums of whole rows, by the reduction kernel, a packed kernel that adds, or torch; no other engine
    can apply RMSNorm. Each row is normed once, and then read by the caller only.
    """
    sums = plan.realization.reduction
    if sums is not None and (sums.parts > sums.block_n or (plan.problem.of_rows is None and sums.parts > 1)):
        findings.add(
            "form", None, f"a tile of {sums.block_n} columns in {sums.parts} parts: only rows to norm have any"
        )
    if plan.problem.of_rows is None:
        return
    outputs = {buffer.name for buffer in plan.schedule.buffers if buffer.home == OUTPUT}
    if outputs - {"y"}:
        findings.add("form", None, f"a norm is of y alone, and outputs are {', '.join(sorted(outputs))}")
        return
    normed: dict[RankOutput, list[Normed]] = {}
    for operation in plan.schedule.operations:
        for region in operation.writes:
            if region.buffer in outputs and not region.is_empty:
                obstacle = _norm_obstacle(plan, operation, region)
                if obstacle:
                    findings.add("form", operation, f"rows of the normed output: {obstacle}", region)
                elif _is_normed_behind(plan, operation):
                    normed.setdefault((region.buffer, region.rank), []).append((*region.rows, operation))
    for (_, rank), rows in normed.items():
        rows.sort(key=itemgetter(0, 1))
        if any(one[1] > other[0] for one, other in zip(rows, rows[1:], strict=False)):
            findings.add("form", None, f"rank {rank} norms a row twice")
            return
    _check_readers(plan, normed, findings)
    _check_all(plan, normed, findings)


def _check_readers(plan: Plan, normed: dict[RankOutput, list[Normed]], findings: Findings) -> None:
    """Refuse operations that read normed rows: wherever these went, they might be normed again, or summed."""
    for operation in plan.schedule.operations:
        for region in () if not normed else operation.reads:
            rows = normed.get((region.buffer, region.rank), ()) if not region.is_empty else ()
            other = next((by for _, _, by in _overlapping_rows(rows, region.rows) if by is not operation), None)
            if other is not None:
                message = f"reads rows of the output that {other.name} has normed, which would be normed or added again"
                findings.add("form", operation, message, region)
                break


def _check_all(plan: Plan, normed: dict[RankOutput, list[Normed]], findings: Findings) -> None:
    """Refuse rows of a result that are not normed."""
    for goal in plan.schedule.goal:
        next_row, (_, end), region = goal.region.rows[0], goal.region.rows, goal.region
        for lo, hi, _ in _overlapping_rows(normed.get((region.buffer, region.rank), []), region.rows):
            next_row = hi if lo <= next_row else next_row
        if next_row < end and not region.is_empty:
            findings.add("form", None, f"row {next_row} of the result is not normed", region)


def _overlapping_rows(ranges: Sequence[Normed], rows: Range) -> Iterator[Normed]:
    """Yield those of disjoint ranges, in ascending order, that share a row with `rows`."""
    first = max(0, bisect_right(ranges, rows[0], key=itemgetter(0)) - 1)
    for entry in islice(ranges, first, None):
        if entry[0] >= rows[1]:
            return
        if entry[1] > rows[0]:
            yield entry


def _is_normed_behind(plan: Plan, operation: Operation) -> bool:
    """Whether rows are normed behind it: a Compute's are not if its product is a part of a sum."""
    return not isinstance(operation, Compute) or plan.schedule.world_size == 1


def _norm_obstacle(plan: Plan, operation: Operation, region: Region) -> str:
    """Return why RMSNorm cannot be applied to rows that an operation writes; "" if it can."""
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


# Whether a plan applies the epilogue of sums if, and only if, its problem has one, on engines that can.
#
# The schedule's values show the rest: a sum with its epilogue has another name (`epilogue_applied` in ir/tensors.py),
# which the goal has too, and nothing can be added to it. So no partial sum gets the epilogue, no sum twice, and each at
# its own rows of the result.


ADDERS = (LIBRARY, TILE_KERNEL, REDUCE_KERNEL, PACKED_KERNEL)


def applies_epilogue(operation: Operation) -> bool:
    return isinstance(operation, Compute | Reduce | Collective) and operation.finishes


def check_sum_epilogue(plan: Plan, findings: Findings) -> None:
    """Check the goals' names against the problem's epilogue, and that only engines that can apply it do."""
    has_epilogue, schedule = plan.problem.sum_epilogue.steps != (), plan.schedule
    for goal in schedule.goal:
        if is_epilogue_applied(goal.tensor) != has_epilogue:
            message = f"epilogue {plan.problem.epilogue}, but the goal is {goal.tensor}"
            findings.add("form", None, message, goal.region)
    for operation in schedule.operations:
        engine = plan.realization.engine_of(operation.queue)
        if not applies_epilogue(operation):
            if has_epilogue and engine == PACKED_KERNEL and isinstance(operation, Reduce):
                findings.add("form", operation, "the packed kernel finishes every sum")
            continue
        if not has_epilogue:
            findings.add("form", operation, "finishes sums, to which no epilogue does anything")
        if engine not in ADDERS:
            findings.add("form", operation, f"the {engine} finishes nothing")
