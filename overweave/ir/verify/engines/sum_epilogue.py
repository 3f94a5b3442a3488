"""Whether a plan applies the epilogue of sums if, and only if, its problem has one, on engines that can.

The schedule's values show the rest: a sum with its epilogue has another name (`epilogue_applied` in ir/tensors.py),
which the goal has too, and nothing can be added to it. So no partial sum gets the epilogue, no sum twice, and each at
its own rows of the result.
"""

from __future__ import annotations

from overweave.ir.plan import LIBRARY, PACKED_KERNEL, REDUCE_KERNEL, TILE_KERNEL, Plan
from overweave.ir.schedule import Collective, Compute, Operation, Reduce
from overweave.ir.tensors import is_epilogue_applied
from overweave.ir.verify.rules.verdict import Findings

ADDERS = (LIBRARY, TILE_KERNEL, REDUCE_KERNEL, PACKED_KERNEL)


def applies_epilogue(operation: Operation) -> bool:
    """Whether an operation applies the epilogue of sums."""
    return isinstance(operation, Compute | Reduce | Collective) and operation.finishes


def check_sum_epilogue(plan: Plan, findings: Findings) -> None:
    """Check the goals' names against the problem's epilogue, and that only engines that can apply it do."""
    has_epilogue, schedule = plan.problem.sum_epilogue.bits != 0, plan.schedule
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
