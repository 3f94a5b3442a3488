"""Binds a plan as its launch on a GPU would, without one: every rank's addresses, tables and queues. Nothing runs.

What launching refuses it refuses here, by the same functions. So a plan that is proven and does not bind is a premise
of launch that the proof does not state.
"""

from __future__ import annotations

from overweave.errors import OverweaveError, ScheduleError
from overweave.ir.launch.order import QueueLaunch, launch_order
from overweave.ir.launch.streams import kernels_on_own_streams, launch_obstacle, waits_without_deadline
from overweave.ir.library_call import library_obstacle
from overweave.ir.plan import AUTHOR_KERNEL, COPY_ENGINE, COPY_KERNEL, LIBRARY, REDUCE_KERNEL, TILE_KERNEL, Plan
from overweave.memory.layout import lay_out
from overweave.memory.lower import (
    WorkspaceAddresses,
    addend_addresses,
    addend_row_shifts,
    copy_steps,
    copy_targets,
    has_fp32_first_operand,
    peer_slot_offsets,
    reduction_operands,
    slice_targets,
    wait_steps,
    write_steps,
)


def obstacle(plan: Plan) -> str:
    """Why some rank's launch refuses the plan, or cannot make sense of it; empty if every rank binds it."""
    ranks = plan.schedule.world_size
    try:
        layout = lay_out(plan.schedule, plan.realization.dtype)
        bases = tuple(rank * layout.size_bytes for rank in range(ranks))
        for rank in range(ranks):
            addresses = WorkspaceAddresses(plan.schedule, plan.realization.dtype, layout, bases)
            for action in launch_order(plan, rank):
                _bind(plan, addresses, action, rank)
            waits_without_deadline(plan, rank)
    except (OverweaveError, LookupError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    own = [tuple(plan.schedule.of_rank(rank)) for rank in range(ranks)]
    gates = (launch_obstacle(plan, operations, queue) for operations in own for queue in kernels_on_own_streams(plan))
    return next(filter(None, gates), "")


def _bind(plan: Plan, addresses: WorkspaceAddresses, action: QueueLaunch, rank: int) -> None:
    """What binding one launch of a rank asks of the plan."""
    engine, queue = action.engine, action.queue
    if engine == COPY_ENGINE:
        copy_steps(addresses, action.operations)
    elif engine == LIBRARY:
        for operation in action.operations:
            if said := library_obstacle(operation, {buffer.name: buffer for buffer in plan.schedule.buffers}):
                raise ScheduleError(f"run {operation.name} by the library", said, "")
            tuple(wait_steps(addresses, operation)), tuple(write_steps(addresses, operation))
    elif engine == TILE_KERNEL:
        addend_addresses(addresses, rank, queue)
        addend_row_shifts(plan.schedule, rank, queue)
        peer_slot_offsets(addresses, rank, queue)
    elif engine == REDUCE_KERNEL:
        reduction_operands(addresses, rank, queue)
        has_fp32_first_operand(plan.schedule, plan.realization.dtype, action.operations)  # type: ignore[arg-type]
    elif engine == COPY_KERNEL:
        copy_targets(addresses, rank, queue)
    elif engine == AUTHOR_KERNEL:
        slice_targets(addresses, rank, queue)
