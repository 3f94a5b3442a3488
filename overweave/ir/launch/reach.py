"""Whether a schedule needs GPUs with peer access to each other's memory."""

from __future__ import annotations

from overweave.ir.schedule import Collective, Operation, Schedule

NO_REACH = "do not reach each other's memory, where it reads or writes rows"


def addresses_peers(schedule: Schedule) -> bool:
    """Whether an operation other than an NCCL collective reads or writes on another rank, or any notifies one."""
    return any(map(_is_at_peers, schedule.operations))


def _is_at_peers(operation: Operation) -> bool:
    """Whether an operation notifies, reads or writes on another rank itself."""
    if any(notify.rank != operation.rank for notify in operation.notifies):
        return True
    if isinstance(operation, Collective):
        return False
    return any(region.rank != operation.rank for region in (*operation.reads, *operation.writes))
