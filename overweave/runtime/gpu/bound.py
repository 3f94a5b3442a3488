"""A plan bound to the memory of a workspace: what each of its actions puts on a stream, in launch order.

Everything that can be decided once is decided here: kernels are compiled and loaded, tables and graphs built, addresses
resolved. A call then costs a few launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch

from overweave.ir.counts import COUNTS, Filled
from overweave.ir.launch.gates import first_own_waits, waits_for_nothing
from overweave.ir.launch.order import QueueLaunch, launch_order
from overweave.ir.launch.reach import addresses_peers
from overweave.ir.launch.streams import most_sms, queues_beside
from overweave.ir.library_call import is_permuted
from overweave.ir.plan import (
    AUTHOR_KERNEL,
    COPY_ENGINE,
    COPY_KERNEL,
    LIBRARY,
    REDUCE_KERNEL,
    SPINNING,
    TILE_KERNEL,
    Plan,
)
from overweave.ir.schedule import INPUT, OUTPUT, Compute, Operation
from overweave.memory.cuda import driver
from overweave.memory.cuda.copy_engine import CopyQueue
from overweave.memory.cuda.heap import sms_for_copies
from overweave.memory.cuda.workspace import Workspace
from overweave.memory.layout import lay_out
from overweave.memory.lower import copy_steps, wait_steps, write_steps
from overweave.memory.steps import CopyStep, WaitStep
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.gpu.waits import PlanWaits
from overweave.runtime.kernel_calls.bind import Binding, TensorsByName, kernel_call
from overweave.runtime.kernel_calls.matmul import matmul_call
from overweave.runtime.kernel_calls.protocol import notify_call, prologue_call, require_peer_access
from overweave.runtime.library.calls import BoundLibraryCall, counted_call, library_call
from overweave.runtime.library.permuted_collectives import permuted_collective_call
from overweave.runtime.library.views import shapes_of

KERNELS = (TILE_KERNEL, AUTHOR_KERNEL, REDUCE_KERNEL, COPY_KERNEL)
Addresses = dict[str, int]
EnqueueOperation = Callable[[torch.cuda.Stream, TensorsByName, Addresses], None]


class TimedOperation(NamedTuple):
    """Events around an operation of a traced plan, its waits left out; operation None: the head of the call."""

    operation: Operation | None
    begin: torch.cuda.Event
    end: torch.cuda.Event

    @contextmanager
    def on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """What is enqueued inside is timed. stream: None for torch's current one."""
        self.begin.record(stream)
        yield
        self.end.record(stream)


class AuthorTiles(Protocol):
    """An author's kernel that computes the tiles of a plan (runtime/gpu/authored.py)."""

    def launch(self, binding: Binding, queue: str) -> Launch | None:
        """What launches it for the tiles of its queue, if there are any on this rank."""

    def all_started(self, binding: Binding) -> WaitStep | None:
        """What a stream waits for until every block has an SM; None of a kernel whose blocks take tile after tile."""


def free_sms(device: torch.device, sms_beside: int) -> int:
    """The SMs that a kernel of tiles may fill: all but those that are left to others beside it, and to copies."""
    sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    return sms - sms_beside - sms_for_copies()


class BoundPlan:
    """enqueue: what each of the plan's actions does, given the caller's stream, the tensors and their addresses.

    Of a traced plan: `timed`, what ran outside of kernels of tiles, and `traces` of those (kernel_calls/bind.py), in
    each call. programs: of each kernel, by its queue. copied: the caller's tensors that copies, or a library's moves,
    read or write: their graphs know the allocation that such a tensor lies in.
    """

    def __init__(
        self,
        plan: Plan,
        workspace: Workspace,
        example: TensorsByName,
        is_traced: bool = False,
        author: AuthorTiles | None = None,
    ) -> None:
        if addresses_peers(plan.schedule):
            require_peer_access(workspace, plan.name)
        rank = workspace.group.rank
        actions = launch_order(plan, rank)
        layout = lay_out(plan.schedule, plan.realization.dtype)
        sms = free_sms(workspace.device, plan.sms_beside)
        binding = Binding(plan, workspace, workspace.lease(layout), example, sms, is_traced)
        self._plan, self._workspace, self._binding, self._is_traced = plan, workspace, binding, is_traced
        self._waits = PlanWaits(plan, rank, layout, binding.protocol)
        self.timed: list[TimedOperation] = []
        self.traces, self._moved = binding.traces, binding.moved
        self.begin: Callable[[int], None] = Launch(prologue_call(workspace, binding.protocol, layout.signals)).start
        if is_traced:
            self.begin = self._timed_head(self.begin)
        self._launches = {one.queue: self._launch(one, author) for one in actions if one.engine in KERNELS}
        self.programs = {queue: launch.programs for queue, launch in self._launches.items() if launch is not None}
        self._tiles_started = author.all_started(binding) if author else None
        self._queues: list[tuple[int, CopyQueue]] = []
        kept = [buffer.name for buffer in plan.schedule.buffers if buffer.home not in (INPUT, OUTPUT)]
        self._own = {name: binding.own(name) for name in kept}
        self._shapes = shapes_of({**example, **self._own})
        in_order = [self._in_order(action, actions[:at]) for at, action in enumerate(actions)]
        self.enqueue: tuple[EnqueueOperation, ...] = (self._move, *in_order, *self._waits.at_end())
        self.copied = self._copied(actions)
        # The caller's tensors are not ours to keep, and a plan's table of tiles, which the device has now, is large.
        del self._plan, self._waits, self._binding

    def prepare(self, addresses: Addresses) -> None:
        """Has the copy queues ready for tensors at these addresses: nothing of a call may be made once it has begun."""
        for side, copies in self._queues:
            copies.prepare(side, addresses)

    def _copied(self, actions: tuple[QueueLaunch, ...]) -> tuple[str, ...]:
        """What copies read or write by the tensor. A library's matmuls are kernels, which know addresses alone."""
        buffer = self._plan.schedule.buffer
        operations = [one for action in actions if action.engine == LIBRARY for one in action.operations]
        moves = [one for one in operations if not isinstance(one, Compute)]
        by_library = [part.buffer for one in moves for part in (*one.reads, *one.writes)]
        named = [name for _, copies in self._queues for name in copies.tensor_names]
        return tuple(dict.fromkeys([*named, *(name for name in by_library if buffer(name).home in (INPUT, OUTPUT))]))

    def _move(self, stream: torch.cuda.Stream, tensors: TensorsByName, addresses: Addresses) -> None:
        """Kernels find the tensors of this call."""
        for name, stand_in in self._moved:
            stand_in.address = addresses[name]

    def _launch(self, action: QueueLaunch, author: AuthorTiles | None) -> Launch | None:
        """The kernel of a queue, if it has tiles on this rank."""
        if action.engine == AUTHOR_KERNEL:
            assert author is not None
            return author.launch(self._binding, action.queue)
        call = kernel_call(self._binding, action.queue, matmul_call)
        return call and Launch(call, self._binding.sms if action.engine == TILE_KERNEL else None)

    def _in_order(self, action: QueueLaunch, earlier: tuple[QueueLaunch, ...]) -> EnqueueOperation:
        """The action, behind what was enqueued earlier on streams of their own for queues that the action's is after.

        Whoever waits for peers is after its own pushes: its blocks must not hold the SMs that those need.
        """
        beside, launched, enqueue = queues_beside(self._plan), {one.queue for one in earlier}, self._enqueued(action)
        after = next(queue.after for queue in self._plan.schedule.queues if queue.name == action.queue)
        sides = [self._workspace.stream(name) for name in after if name in launched and name in beside]
        if not sides or action.queue in beside:
            return enqueue
        done = torch.cuda.Event()

        def behind(stream: torch.cuda.Stream, *given: Any) -> None:
            for side in sides:
                done.record(side)
                stream.wait_event(done)
            enqueue(stream, *given)

        return behind

    def _enqueued(self, action: QueueLaunch) -> EnqueueOperation:
        if action.engine == COPY_ENGINE:
            return self._timed_copies(action) if self._is_traced else self._copies(action)
        if action.engine == LIBRARY:
            return self._library(action.operations[0])
        if action.queue in queues_beside(self._plan):
            return self._kernel_beside(action)
        gate = self._pushes_started() if action.engine in (TILE_KERNEL, AUTHOR_KERNEL) else None
        launch = self._launches[action.queue]

        def enqueue(stream: torch.cuda.Stream, tensors: TensorsByName, addresses: Addresses) -> None:
            if gate is not None:
                driver.wait_value(stream.cuda_stream, gate.address, gate.value)
            if launch is not None:
                launch.start(stream.cuda_stream)

        return enqueue

    def _pushes_started(self) -> WaitStep | None:
        """What tiles are launched behind, where a copy kernel runs beside them and waits for none of them: as many of
        its tiles are claimed as it has programs. Tiles wait for peers, and peers for the pushes of this rank: so these
        have their SMs first, whatever else runs on the GPU."""
        engines = self._plan.realization
        after = {queue.name: queue.after for queue in self._plan.schedule.queues}
        operations = self._plan.schedule.of_rank(self._binding.rank)
        pushes = [op for op in operations if engines.engine_of(op.queue) == COPY_KERNEL and not after[op.queue]]
        programs = next((self.programs[op.queue] for op in pushes if op.queue in self.programs), None)
        if programs is None or not waits_for_nothing(pushes):
            return None
        return WaitStep(self._binding.claims(COPY_KERNEL).data_ptr(), programs)

    def _kernel_beside(self, action: QueueLaunch) -> EnqueueOperation:
        """A kernel on a stream of its own, launched once the first own tiles that it waits for are stored.

        Then blocks of the tile kernel are running, and blocks of this one that wait cannot keep them from it. A
        reduction waits for the last tiles: it takes the SMs that those leave idle. Pushes have SMs that the tile
        kernel leaves to them; those that wait for nothing are launched ahead of it.
        """
        rank, first, launch = self._binding.rank, action.operations[0], self._launches[action.queue]
        waits = first_own_waits(tuple(self._plan.schedule.of_rank(rank)), action.queue)
        gate = [step for wait in waits for step in wait_steps(self._binding.addresses, first, wait)]
        gate += [self._tiles_started] if self._tiles_started and self._may_hold_all(action) else []
        side = self._workspace.stream(action.queue).cuda_stream

        def enqueue(stream: torch.cuda.Stream, tensors: TensorsByName, addresses: Addresses) -> None:
            for step in gate:
                driver.wait_value(side, step.address, step.value)
            if launch is not None:
                launch.start(side)

        return enqueue

    def _may_hold_all(self, action: QueueLaunch) -> bool:
        """Whether blocks of a kernel are so many that tiles of others, one for each block, may find no SM."""
        realization = self._plan.realization
        config = realization.reduction if action.engine == REDUCE_KERNEL else realization.copy
        return config is not None and config.programs > SPINNING

    def _counted_copies(self, action: QueueLaunch) -> EnqueueOperation:
        """Copies of the rows that a call's counts fill, enqueued one by one: no graph holds their sizes."""
        slot, schedule = self._binding.addresses, self._plan.schedule
        side = self._workspace.stream(action.queue).cuda_stream

        def enqueue(stream: torch.cuda.Stream, tensors: TensorsByName, addresses: Addresses) -> None:
            filled = Filled(schedule, tensors[COUNTS].tolist())
            CopyQueue(copy_steps(slot, map(filled.operation, action.operations))).issue(side, addresses)

        return enqueue

    def _copies(self, action: QueueLaunch) -> EnqueueOperation:
        if self._plan.problem.counted:
            return self._counted_copies(action)
        copies = CopyQueue(copy_steps(self._binding.addresses, action.operations), self._workspace.drain)
        side = self._workspace.stream(action.queue).cuda_stream
        self._queues.append((side, copies))
        return lambda stream, tensors, addresses: copies.launch(side, addresses)

    def _timed_copies(self, action: QueueLaunch) -> EnqueueOperation:
        """The same, one by one, with events before and behind each chunk."""
        side = self._workspace.stream(action.queue)
        parts: list[tuple[CopyQueue, TimedOperation | None]] = []
        for operation in action.operations:
            steps = copy_steps(self._binding.addresses, (operation,))
            for is_chunk, run in groupby(steps, lambda step: isinstance(step, CopyStep)):
                parts.append((CopyQueue(tuple(run)), self._timing(operation) if is_chunk else None))

        def enqueue(stream: torch.cuda.Stream, tensors: TensorsByName, addresses: Addresses) -> None:
            for part, timed in parts:
                with nullcontext() if timed is None else timed.on(side):
                    part.issue(side.cuda_stream, addresses)

        return enqueue

    def _timed_head(self, head: Callable[[int], None]) -> Callable[[int], None]:
        timed = self._timing(None)

        def begin(stream: int) -> None:
            with timed.on(None):
                head(stream)

        return begin

    def _timing(self, operation: Operation | None) -> TimedOperation:
        timed = TimedOperation(operation, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self.timed.append(timed)
        return timed

    def _library_call(self, operation: Operation) -> BoundLibraryCall:
        """The call itself. Beside tiles a collective's kernel takes no more SMs than the tiles leave."""
        plan, group = self._plan, self._workspace.group
        buffers = {buffer.name: buffer for buffer in plan.schedule.buffers}
        if is_permuted(operation, buffers):
            return permuted_collective_call(operation, buffers, group, most_sms(plan, operation))
        if plan.problem.counted:
            return counted_call(operation, plan, group)
        return library_call(operation, plan.problem, self._shapes, group)

    def _library(self, operation: Operation) -> EnqueueOperation:
        """A library call; on a stream of its own it waits there, as copies do, and the stream sets its signals.
        Collectives go to the library in the order in which they are enqueued, that of the schedule on all ranks."""
        timed, own = self._timing(operation) if self._is_traced else None, self._own
        library = self._library_call(operation)
        addresses = self._binding.addresses
        writes = tuple(write_steps(addresses, operation))

        def call(stream: torch.cuda.Stream, tensors: TensorsByName) -> None:
            if timed is None:
                library({**tensors, **own})
            else:
                with timed.on(stream):
                    library({**tensors, **own})

        if operation.queue in queues_beside(self._plan):
            side, waits = self._workspace.stream(operation.queue), tuple(wait_steps(addresses, operation))

            def beside(stream: torch.cuda.Stream, tensors: TensorsByName, addresses: Addresses) -> None:
                for step in waits:
                    driver.wait_value(side.cuda_stream, step.address, step.value)
                with torch.cuda.stream(side):
                    call(side, tensors)
                for write in writes:
                    driver.write_value(side.cuda_stream, write.address, write.value)

            return beside
        wait, told = self._waits.of(operation), tuple(write.address for write in writes)
        tell = Launch(notify_call(told, self._workspace.device)).start if told else None

        def enqueue(stream: torch.cuda.Stream, tensors: TensorsByName, addresses: Addresses) -> None:
            wait(stream.cuda_stream)
            call(stream, tensors)
            if tell is not None:
                tell(stream.cuda_stream)

        return enqueue
