"""One traced call of a Plan on emulated ranks. A host's ranks share one clock, which interpreted kernels read too."""

from __future__ import annotations

from itertools import chain

import torch.distributed as dist

from overweave.ir.plan import Plan
from overweave.ir.timeline.operations import notifiers
from overweave.ir.timeline.timeline import KINDS, WAIT, Timeline
from overweave.memory.group import Group
from overweave.runtime.host.emulate import TensorsByName
from overweave.runtime.host.host import Depth, run_on_host
from overweave.runtime.trace import HEAD, NOT_A_TILE, Record, Stopwatch, gather_records, make_measured_timeline


def trace_on_host(
    plan: Plan, group: Group, inputs: TensorsByName, outputs: TensorsByName, depth: Depth = "library"
) -> Timeline | None:
    """Run the plan once; return on rank 0 when each tile (interpreter depth) or operation ran, None elsewhere.

    Collective. Raises what `run_on_host` does.
    """
    dist.barrier(group.process_group)
    watch = Stopwatch()
    run_on_host(plan, group, inputs, outputs, depth=depth, stopwatch=watch)
    by_rank = gather_records(group, watch.records(plan, group.rank))
    return None if by_rank is None else make_measured_timeline(plan, subtract_poll_time(plan, by_rank))


def subtract_poll_time(plan: Plan, by_rank: list[list[Record]]) -> list[list[Record]]:
    """Return the records with each tile's wait ended when its last signal was set, and its run begun then.

    A GPU polls in a microsecond. An interpreted poll takes as long as a tile: it counts as work, not as a wait.
    """
    ends: dict[str, int] = {}
    for rank, records in enumerate(by_rank):
        operations = tuple(plan.schedule.of_rank(rank))
        for record in records:
            if record.operation != HEAD:
                name = operations[record.operation].name
                ends[name] = max(ends.get(name, 0), record.end_ns)
    sources = notifiers(plan.schedule)
    arrivals = {
        (operation.rank, operation.name): max(
            (
                ends.get(name, 0)
                for wait in operation.all_waits
                for signal in range(*wait.signals)
                for name in sources.get((operation.rank, wait.pad, signal), ())
            ),
            default=0,
        )
        for operation in plan.schedule.operations
    }
    return [
        list(chain.from_iterable(_subtract_poll_time(records, [arrivals[rank, part.name] for part in operations])))
        for rank, records in enumerate(by_rank)
        for operations in [tuple(plan.schedule.of_rank(rank))]
    ]


def _subtract_poll_time(records: list[Record], arrivals: list[int]) -> list[tuple[Record, ...]]:
    """Return one rank's records. arrivals: of each operation, when its last signal was set."""
    waits = {
        (record.operation, record.tile): record
        for record in records
        if record.tile != NOT_A_TILE and KINDS[record.kind] == WAIT
    }
    shortened: list[tuple[Record, ...]] = []
    for record in records:
        wait = waits.get((record.operation, record.tile))
        if wait is None:
            shortened.append((record,))
        elif record is not wait:
            over_ns = min(max(arrivals[record.operation], wait.begin_ns), record.begin_ns)
            shorter = (wait._replace(end_ns=over_ns),) if over_ns > wait.begin_ns else ()
            shortened.append((*shorter, record._replace(begin_ns=over_ns)))
    return shortened
