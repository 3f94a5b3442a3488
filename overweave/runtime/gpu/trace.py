"""One traced call of a Plan on GPUs: tiles by the device clock, copies and library calls by events, on one time axis.

    current stream   sleep | barrier | barrier, reads the clock | event | the call ...

The sleep hides host time. Every rank leaves the second barrier at the same instant, to about 1 us: its clock there is
the zero of all its times. The event behind it maps event times to the same axis, late by the end of a kernel, about
1 us, too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from overweave.compat.torch_names import sleep
from overweave.errors import InputError
from overweave.ir.plan import Plan
from overweave.ir.schedule import ECHOES
from overweave.ir.timeline.timeline import BEGIN, KINDS, Timeline
from overweave.memory.cuda.heap import CudaHeap
from overweave.memory.cuda.workspace import Workspace
from overweave.memory.device.protocol import CLOCK
from overweave.memory.layout import SIGNAL_STRIDE_BYTES
from overweave.runtime.gpu.bound import BoundPlan, bind_with_prologue
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.kernel_calls.bind import TensorsByName
from overweave.runtime.kernel_calls.call import control_words, stamp_call
from overweave.runtime.trace import (
    HEAD,
    NOT_A_TILE,
    Record,
    gather_records,
    make_measured_timeline,
    operation_record,
    tile_records,
    with_waits,
)

WARM_CALLS = 2
SLEEP_CYCLES = 4_000_000  # about 2 ms: longer than the host needs to enqueue a call chunk by chunk


class Stamp:
    """A barrier on the current stream that reads the clock. Created collectively; its waits have the usual deadline."""

    def __init__(self, workspace: Workspace) -> None:
        group, device = workspace.group, workspace.device
        self._heap = CudaHeap(group, device, group.world_size * SIGNAL_STRIDE_BYTES)
        self._state = torch.zeros(2, dtype=torch.int64, device=device)
        addresses = torch.tensor(self._heap.addresses, dtype=torch.int64, device=device)
        signals = self._heap.view(0, (group.world_size * SIGNAL_STRIDE_BYTES // 4,), torch.int32)
        words = [self._state, addresses, signals, control_words(workspace), workspace.limits]
        self._launch = Launch(stamp_call(words, group.rank, group.world_size))

    def __call__(self) -> None:
        """Enqueue the barrier. Collective."""
        self._launch.start(torch.cuda.current_stream().cuda_stream)

    def clock_ns(self) -> int:
        """Return the device clock as this rank left the last barrier. Waits for it."""
        return int(self._state[CLOCK.value])


def trace_on_gpu(plan: Plan, workspace: Workspace, tensors: TensorsByName) -> Timeline | None:
    """Run the plan, warm; return on rank 0 when each tile and chunk ran, None elsewhere. Collective.

    tensors: those of every input and output buffer; outputs are written. Raises PeerError for a call that failed.
    Raises InputError for a plan of packed messages, whose kernel takes no times.
    """
    if plan.schedule.reuse == ECHOES:
        raise InputError(f"trace {plan.name}", "the packed kernel takes no times", "Trace another plan")
    run, stamp = bind_with_prologue(plan, workspace, tensors, is_traced=True), Stamp(workspace)
    after_stamp = torch.cuda.Event(enable_timing=True)
    for _ in range(WARM_CALLS):
        run(tensors)
        stamp()
    workspace.check()
    dist.barrier(workspace.group.process_group)
    sleep(SLEEP_CYCLES)
    stamp()
    stamp()
    after_stamp.record()
    run(tensors)
    workspace.check()
    zero_ns = stamp.clock_ns()
    by_rank = gather_records(
        workspace.group, _records(plan, workspace.group.rank, run.bound, (zero_ns, after_stamp)), zero_ns
    )
    return None if by_rank is None else make_measured_timeline(plan, by_rank)


def _records(plan: Plan, rank: int, bound: BoundPlan, zero: tuple[int, torch.cuda.Event]) -> list[Record]:
    """Return the records of a traced call. zero: clock and event of the instant that is zero on all ranks."""
    zero_ns, zero_event = zero
    operations = tuple(plan.schedule.of_rank(rank))
    positions = {operation.name: position for position, operation in enumerate(operations)}

    def at_ns(event: torch.cuda.Event) -> int:
        return zero_ns + int(zero_event.elapsed_time(event) * 1e6)

    records: list[Record] = []
    for timed in bound.timed:
        begin_ns, end_ns = at_ns(timed.begin), at_ns(timed.end)
        if timed.operation is None:
            records.append(Record(HEAD, KINDS.index(BEGIN), NOT_A_TILE, 0, begin_ns, end_ns))
        else:
            records.append(operation_record(positions[timed.operation.name], timed.operation, begin_ns, end_ns))
    for queue, times in bound.traces.items():
        records += tile_records(plan, rank, queue, times.cpu(), bound.programs[queue])
    return with_waits(operations, records)
