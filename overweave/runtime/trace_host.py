"""One traced call of a Plan on emulated ranks."""

from __future__ import annotations

import torch.distributed as dist

from overweave.ir.plan import Plan
from overweave.ir.timeline import Timeline
from overweave.memory.group import Group
from overweave.runtime.emulate import Tensors
from overweave.runtime.host import Depth, run_on_host
from overweave.runtime.trace import Stopwatch, merge


def trace_on_host(
    plan: Plan, group: Group, inputs: Tensors, outputs: Tensors, depth: Depth = "library"
) -> Timeline | None:
    """Runs the plan once and says when each tile (interpreter depth) or operation ran: on rank 0, None elsewhere.

    Collective. The ranks of a host share one clock. Raises what `run_on_host` does.
    """
    dist.barrier(group.process_group)
    watch = Stopwatch()
    run_on_host(plan, group, inputs, outputs, depth=depth, stopwatch=watch)
    return merge(plan, group, watch.records(plan, group.rank))
