"""Whether a plan finishes its sums if, and only if, its epilogue does anything to such, and by engines that can.

That no part of a sum is finished, no sum twice, and each beside the rows of the result, the schedule's values show:
what is finished has another name (`finished` in ir/schedule.py), which is the goal's, and nothing can be added to it.
"""

from __future__ import annotations

from overweave.ir.plan import LIBRARY, PACKED_KERNEL, REDUCE_KERNEL, TILE_KERNEL, Plan
from overweave.ir.schedule import Collective, Compute, Operation, Reduce
from overweave.ir.tensors import is_finished
from overweave.ir.verify.rules.verdict import Findings

ADDERS = (LIBRARY, TILE_KERNEL, REDUCE_KERNEL, PACKED_KERNEL)


def finishes(operation: Operation) -> bool:
    """Whether an operation says that it finishes sums."""
    return isinstance(operation, Compute | Reduce | Collective) and operation.finishes


def check_finished(plan: Plan, findings: Findings) -> None:
    """The goal is of finished sums if the epilogue does anything to such, and the engines that finish them can."""
    wanted, schedule = plan.problem.of_sums.bits != 0, plan.schedule
    for goal in schedule.goal:
        if is_finished(goal.tensor) != wanted:
            said = f"epilogue {plan.problem.epilogue}, but the goal is {goal.tensor}"
            findings.add("form", None, said, goal.region)
    for operation in schedule.operations:
        engine = plan.realization.engine_of(operation.queue)
        if not finishes(operation):
            if wanted and engine == PACKED_KERNEL and isinstance(operation, Reduce):
                findings.add("form", operation, "the packed kernel finishes every sum")
            continue
        if not wanted:
            findings.add("form", operation, "finishes sums, to which no epilogue does anything")
        if engine not in ADDERS:
            findings.add("form", operation, f"the {engine} finishes nothing")
