"""A plan bound to the memory of a workspace: what each of its actions puts on a stream, in launch order.

Everything that can be decided once is decided here: kernels are compiled and loaded, tables and graphs built, addresses
resolved. A call then costs a few launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch

from overweave.ir.counts import COUNTS, Filled
from overweave.ir.exchange import addresses_peers, reached_by
from overweave.ir.launch.order import QueueLaunch, launch_order
from overweave.ir.launch.streams import first_own_waits, most_sms, queues_beside, waits_for_nothing
from overweave.ir.library_call import is_permuted
from overweave.ir.plan import (
    AUTHOR_KERNEL,
    COPY_ENGINE,
    COPY_KERNEL,
    LIBRARY,
    PACKED_KERNEL,
    REDUCE_KERNEL,
    SPINNING,
    TILE_KERNEL,
    Plan,
)
from overweave.ir.schedule import ECHOES, INPUT, LOCAL, OUTPUT, Collective, Compute, Operation
from overweave.memory.cuda import driver
from overweave.memory.cuda.copy_engine import CopyQueue
from overweave.memory.cuda.heap import sms_for_copies
from overweave.memory.cuda.workspace import Workspace
from overweave.memory.group import Group, create_subgroups, subgroup
from overweave.memory.layout import lay_out, lay_out_packed
from overweave.memory.lower import CopyStep, WaitStep, copy_steps, wait_steps, write_steps
from overweave.process_settings import current
from overweave.runtime.gpu.call_frame import PlanRun
from overweave.runtime.gpu.launcher import Launch, PlanWaits, supports_dependent_launch
from overweave.runtime.gpu.replays import may_replay
from overweave.runtime.kernel_calls.bind import Binding, TensorsByName, kernel_call
from overweave.runtime.kernel_calls.call import (
    KernelCall,
    MatrixInput,
    control_words,
    notify_call,
    prologue_call,
    require_peer_access,
    stand_in_for,
)
from overweave.runtime.kernel_calls.matmul import matmul_call
from overweave.runtime.kernel_calls.packed import Caller, ChainPosition, SkinnyOperands, packed_call, skinny_call
from overweave.runtime.library.calls import (
    BoundLibraryCall,
    LibraryRun,
    call_of,
    is_library_plan,
    library_call,
    permuted_collective_call,
    shapes_of,
)

# There is no prologue and no side stream. Both are one graph once a call's tensors recur (runtime/gpu/replays.py).

EnqueuePacked = Callable[[torch.cuda.Stream, Mapping[str, torch.Tensor], dict[str, int]], None]


class PackedPlan:
    """A plan bound to the packed space of a workspace. Collective if the space must grow.

    Calls become graphs only if waiting programs are fewer than SMs. Otherwise there could be a deadlock: to create a
    graph the driver may wait until this rank's kernels have ended; a kernel of NCCL, say, among them waits for an SM on
    a peer; a peer that is ahead has filled its SMs with this call, which waits for this rank. A matmul that starts
    early behind a gather holds its SMs as long. (Calls with a prologue need no such rule: their kernels run once every
    peer has enqueued the call.)
    """

    launch_prologue = prepare = None
    copied = ()  # kernels refer to tensors by address alone

    def __init__(self, plan: Plan, workspace: Workspace, example: Mapping[str, torch.Tensor]) -> None:
        self._plan, self._workspace = plan, workspace
        self._space = workspace.packed_space(lay_out_packed(plan).half_bytes)
        self._own = self._own_buffers()
        self._stand_ins = {name: stand_in_for(tensor) for name, tensor in example.items()}
        self._matrices: dict[str, MatrixInput] = {**self._stand_ins, **self._own}
        operations = tuple(plan.schedule.of_rank(workspace.group.rank))
        engines = groupby(operations, lambda operation: plan.realization.engine_of(operation.queue))
        runs = [(engine == LIBRARY, tuple(members)) for engine, members in engines]
        skinny = plan.realization.skinny
        has_both = len(runs) == 2 and any(is_library and _has_rows(members) for is_library, members in runs)
        self._is_chained = (
            has_both and skinny is not None and skinny.early and supports_dependent_launch(workspace.device)
        )
        self._waiting_programs = 0  # programs that hold SMs while they wait for messages
        steps = [self._bind_run(is_library, members, at > 0) for at, (is_library, members) in enumerate(runs)]
        self.enqueue: tuple[EnqueuePacked, ...] = (self._set_addresses, *(one for step in steps for one in step))
        self.may_replay = (
            self._waiting_programs < torch.cuda.get_device_properties(workspace.device).multi_processor_count
        )
        del self._plan

    def _set_addresses(self, stream: torch.cuda.Stream, tensors: object, addresses: dict[str, int]) -> None:
        for name, address in addresses.items():
            self._stand_ins[name].address = address

    def _bind_run(self, is_library: bool, operations: tuple[Operation, ...], follows: bool) -> list[EnqueuePacked]:
        """Bind adjacent operations: cuBLAS calls or our matmuls one by one, or the one packed kernel of all of them.

        follows: there are operations before them.
        """
        if not is_library:
            return [_enqueue_launch(self._kernel(follows))]
        if self._plan.realization.skinny is not None:
            return [_enqueue_launch(launch) for launch in self._matmuls(operations, follows)]
        shapes, problem, group = shapes_of(self._matrices), self._plan.problem, self._workspace.group
        return [self._enqueue_call(library_call(operation, problem, shapes, group)) for operation in operations]

    def _enqueue_call(self, call: Callable[[dict[str, torch.Tensor]], None]) -> EnqueuePacked:
        return lambda stream, tensors, addresses: call({**tensors, **self._own})

    def _matmuls(self, operations: tuple[Operation, ...], follows: bool) -> list[Launch]:
        """Return the launches of matmuls that have rows. The packed kernel is next to the first, or to the last."""
        computes = [each for each in operations if isinstance(each, Compute) and not each.writes[0].is_empty]
        neighbour = 0 if follows else len(computes) - 1
        position: ChainPosition = "follows" if follows else "leads"
        return [
            self._matmul(each, position if self._is_chained and at == neighbour else "in_turn")
            for at, each in enumerate(computes)
        ]

    def _matmul(self, compute: Compute, position: ChainPosition) -> Launch:
        """Return the launch of a matmul of whole matrices, as verify requires in such a plan."""
        config = self._plan.realization.skinny
        assert config is not None
        operands = SkinnyOperands(*(self._matrices[part.buffer] for part in (compute.a[0], compute.b, compute.out[0])))
        launch = Launch(skinny_call(config, operands, self._workspace.shares, position))
        self._waiting_programs += launch.programs if position == "follows" else 0
        return launch

    def _kernel(self, is_later: bool) -> Launch:
        """Return the launch of the packed kernel. is_later: the matmul comes before it."""
        plan, workspace = self._plan, self._workspace
        config = plan.realization.packed
        assert config is not None
        caller = Caller(workspace.group.rank, (control_words(workspace), workspace.limits), self._is_chained, is_later)
        launch = Launch(packed_call(config, plan.problem, lay_out_packed(plan), self._matrices, self._space, caller))
        self._waiting_programs += launch.programs
        return launch

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        """Return the local buffers: of the product, or of the gathered matrix."""
        local = [each for each in self._plan.schedule.buffers if each.home == LOCAL]
        dtypes = {each.name: getattr(torch, each.dtype or self._plan.realization.dtype) for each in local}
        return {each.name: self._space.product((each.rows, each.cols), dtypes[each.name]) for each in local}


def _has_rows(operations: tuple[Operation, ...]) -> bool:
    return any(not region.is_empty for each in operations for region in each.writes)


def _enqueue_launch(launch: Launch) -> EnqueuePacked:
    start = launch.start
    return lambda stream, tensors, addresses: start(stream.cuda_stream)


KERNELS = (TILE_KERNEL, AUTHOR_KERNEL, REDUCE_KERNEL, COPY_KERNEL, PACKED_KERNEL)
Addresses = dict[str, int]
EnqueueOperation = Callable[[torch.cuda.Stream, TensorsByName, Addresses], None]


class TimedOperation(NamedTuple):
    """Events around an operation of a traced plan, without its waits; operation None: the prologue of the call."""

    operation: Operation | None
    begin: torch.cuda.Event
    end: torch.cuda.Event

    @contextmanager
    def on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Time what is enqueued inside. stream: None for torch's current one."""
        self.begin.record(stream)
        yield
        self.end.record(stream)


class AuthorTiles(Protocol):
    """An author's kernel that computes the tiles of a plan (runtime/gpu/authored.py)."""

    def launch(self, binding: Binding, queue: str) -> Launch | None:
        """Return its launch for the tiles of a queue; None if there are none on this rank."""

    def blocks_resident(self, binding: Binding) -> WaitStep | None:
        """Return a stream's wait until every block has an SM; None for a persistent kernel."""


def free_sms(device: torch.device, sms_beside: int) -> int:
    """Return the SMs that a tile kernel may fill: all but those left to concurrent kernels, to copies, and to others by
    `ow.settings(sm_margin=)`; one at least."""
    sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, sms - sms_beside - sms_for_copies() - current().sm_margin)


class BoundPlan:
    """A plan bound to a workspace.

    enqueue: one function for each action, of the caller's stream, the tensors and their addresses. launch_prologue: on
    a stream. programs: queue -> programs of its kernel. copied: the caller's tensors that copies, or NCCL, access:
    graphs refer to them by allocation. Of a traced plan: timed, operations outside of tile kernels; traces, queue ->
    times of the tiles (kernel_calls/bind.py).
    """

    def __init__(
        self,
        plan: Plan,
        workspace: Workspace,
        example: TensorsByName,
        is_traced: bool = False,
        author: AuthorTiles | None = None,
    ) -> None:
        rank = workspace.group.rank
        if addresses_peers(plan.schedule):  # of a plan of one island credits of all ranks are a premise
            reached = reached_by(plan.schedule, rank) if plan.problem.islands else None
            require_peer_access(workspace, plan.name, reached)
        actions = launch_order(plan, rank)
        layout = lay_out(plan.schedule, plan.realization.dtype)
        sms = free_sms(workspace.device, plan.sms_beside)
        binding = Binding(plan, workspace, workspace.lease(layout), example, sms, is_traced)
        self._plan, self._workspace, self._binding, self._is_traced = plan, workspace, binding, is_traced
        self._waits = PlanWaits(plan, rank, layout, binding.protocol)
        self.timed: list[TimedOperation] = []
        self.traces, self._stand_ins = binding.traces, binding.stand_ins
        self.launch_prologue: Callable[[int], None] = Launch(
            prologue_call(workspace, binding.protocol, layout.signals)
        ).start
        if is_traced:
            self.launch_prologue = self._timed_prologue(self.launch_prologue)
        self._launches = {one.queue: self._launch(one, author) for one in actions if one.engine in KERNELS}
        self.programs = {queue: launch.programs for queue, launch in self._launches.items() if launch is not None}
        self._tiles_resident = author.blocks_resident(binding) if author else None
        self._queues: list[tuple[int, CopyQueue]] = []
        workspace_buffers = [buffer.name for buffer in plan.schedule.buffers if buffer.home not in (INPUT, OUTPUT)]
        self._workspace_buffers = {name: binding.workspace_buffer(name) for name in workspace_buffers}
        self._shapes = shapes_of({**example, **self._workspace_buffers})
        in_order = [self._after_queues(action, actions[:at]) for at, action in enumerate(actions)]
        self.enqueue: tuple[EnqueueOperation, ...] = (self._set_addresses, *in_order, *self._waits.at_end())
        self.copied = self._graph_tensors(actions)
        # Do not keep the caller's tensors alive, nor the plan's tile table: it is large, and copied to the device.
        del self._plan, self._waits, self._binding

    def prepare(self, addresses: Addresses) -> None:
        """Create the copy queues' graphs for tensors at these addresses, before a call begins."""
        for side, copies in self._queues:
            copies.prepare(side, addresses)

    def _graph_tensors(self, actions: tuple[QueueLaunch, ...]) -> tuple[str, ...]:
        """Return the tensors that copies and collectives access.

        A cuBLAS matmul is a kernel, which uses addresses alone.
        """
        buffer = self._plan.schedule.buffer
        operations = [one for action in actions if action.engine == LIBRARY for one in action.operations]
        moves = [one for one in operations if not isinstance(one, Compute)]
        by_library = [part.buffer for one in moves for part in (*one.reads, *one.writes)]
        named = [name for _, copies in self._queues for name in copies.tensor_names]
        return tuple(dict.fromkeys([*named, *(name for name in by_library if buffer(name).home in (INPUT, OUTPUT))]))

    def _set_addresses(self, stream: torch.cuda.Stream, tensors: TensorsByName, addresses: Addresses) -> None:
        for name, stand_in in self._stand_ins:
            stand_in.address = addresses[name]

    def _launch(self, action: QueueLaunch, author: AuthorTiles | None) -> Launch | None:
        """Return the launch of a queue's kernel; None if it has no tiles on this rank."""
        if action.engine == AUTHOR_KERNEL:
            assert author is not None
            return author.launch(self._binding, action.queue)
        if action.engine == PACKED_KERNEL:
            return Launch(self._packed_call())
        call = kernel_call(self._binding, action.queue, matmul_call)
        return call and Launch(call, self._binding.sms if action.engine == TILE_KERNEL else None)

    def _packed_call(self) -> KernelCall:
        """Return the kernel of packed messages behind a prologue, in a space of its own or a finished plan's."""
        plan, workspace, config = self._plan, self._workspace, self._plan.realization.packed
        assert config is not None
        layout = lay_out_packed(plan)
        caller = Caller(workspace.group.rank, (control_words(workspace), workspace.limits))
        ends = {name: self._binding.buffer(name) for name in (layout.source, layout.out)}
        return packed_call(config, plan.problem, layout, ends, workspace.packed_space(layout.half_bytes), caller)

    def _after_queues(self, action: QueueLaunch, earlier: tuple[QueueLaunch, ...]) -> EnqueueOperation:
        """Return an action that waits for earlier work on side streams of the queues that its queue is after.

        A kernel that waits for peers is after this rank's pushes: its blocks must not hold the SMs that pushes need.
        """
        side_queues, enqueue = queues_beside(self._plan), self._bind_action(action)
        launched = {one.queue for one in earlier} & {*side_queues}
        after = next(queue.after for queue in self._plan.schedule.queues if queue.name == action.queue)
        sides = [self._workspace.stream(name) for name in after if name in launched]
        if not sides or action.queue in side_queues:
            return enqueue
        done = torch.cuda.Event()

        def enqueue_after(stream: torch.cuda.Stream, *arguments: Any) -> None:
            for side in sides:
                done.record(side)
                stream.wait_event(done)
            enqueue(stream, *arguments)

        return enqueue_after

    def _bind_action(self, action: QueueLaunch) -> EnqueueOperation:
        """Return the function that enqueues an action, without waits for other queues."""
        if action.engine == COPY_ENGINE:
            return self._bind_timed_copies(action) if self._is_traced else self._bind_copies(action)
        if action.engine == LIBRARY:
            return self._bind_library_operation(action.operations[0])
        if action.queue in queues_beside(self._plan):
            return self._bind_side_kernel(action)
        gate = self._pushes_resident() if action.engine in (TILE_KERNEL, AUTHOR_KERNEL) else None
        launch = self._launches[action.queue]

        def enqueue(stream: torch.cuda.Stream, tensors: TensorsByName, addresses: Addresses) -> None:
            if gate is not None:
                driver.wait_value(stream.cuda_stream, gate.address, gate.value)
            if launch is not None:
                launch.start(stream.cuda_stream)

        return enqueue

    def _pushes_resident(self) -> WaitStep | None:
        """Return a wait until every program of the concurrent copy kernel has an SM; None if that waits for tiles.

        Tiles wait for peers, and peers for this rank's pushes: so pushes get their SMs first. The wait is for as many
        claims as the copy kernel has programs.
        """
        engines = self._plan.realization
        after = {queue.name: queue.after for queue in self._plan.schedule.queues}
        operations = self._plan.schedule.of_rank(self._binding.rank)
        pushes = [op for op in operations if engines.engine_of(op.queue) == COPY_KERNEL and not after[op.queue]]
        programs = next((self.programs[op.queue] for op in pushes if op.queue in self.programs), None)
        if programs is None or not waits_for_nothing(pushes):
            return None
        return WaitStep(self._binding.claims(COPY_KERNEL).data_ptr(), programs)

    def _bind_side_kernel(self, action: QueueLaunch) -> EnqueueOperation:
        """Bind a kernel on a side stream, launched once the first own tiles that it waits for are stored.

        Then the tile kernel's blocks have their SMs, and waiting blocks of this one cannot take them. A reduction waits
        for the last tiles and takes the SMs that these leave idle. Pushes have SMs that the tile kernel leaves free;
        pushes that wait for nothing are launched ahead of it.
        """
        rank, first, launch = self._binding.rank, action.operations[0], self._launches[action.queue]
        waits = first_own_waits(tuple(self._plan.schedule.of_rank(rank)), action.queue)
        gate = [step for wait in waits for step in wait_steps(self._binding.addresses, first, wait)]
        gate += [self._tiles_resident] if self._tiles_resident and self._may_fill_sms(action) else []
        side = self._workspace.stream(action.queue).cuda_stream

        def enqueue(stream: torch.cuda.Stream, tensors: TensorsByName, addresses: Addresses) -> None:
            for step in gate:
                driver.wait_value(side, step.address, step.value)
            if launch is not None:
                launch.start(side)

        return enqueue

    def _may_fill_sms(self, action: QueueLaunch) -> bool:
        """Return whether a kernel has so many blocks that a concurrent kernel with one tile a block may get no SM."""
        realization = self._plan.realization
        config = realization.reduction if action.engine == REDUCE_KERNEL else realization.copy
        return config is not None and config.programs > SPINNING

    def _bind_counted_copies(self, action: QueueLaunch) -> EnqueueOperation:
        """Bind copies of the rows that a call's counts fill, enqueued one by one: a graph would fix their sizes."""
        slot, schedule = self._binding.addresses, self._plan.schedule
        side = self._workspace.stream(action.queue).cuda_stream

        def enqueue(stream: torch.cuda.Stream, tensors: TensorsByName, addresses: Addresses) -> None:
            filled = Filled(schedule, tensors[COUNTS].tolist())
            CopyQueue(copy_steps(slot, map(filled.operation, action.operations))).issue(side, addresses)

        return enqueue

    def _bind_copies(self, action: QueueLaunch) -> EnqueueOperation:
        """Bind a copy-engine queue: one graph on its side stream."""
        if not self._plan.problem.has_fixed_sizes:
            return self._bind_counted_copies(action)
        copies = CopyQueue(copy_steps(self._binding.addresses, action.operations), self._workspace.drain)
        side = self._workspace.stream(action.queue).cuda_stream
        self._queues.append((side, copies))
        return lambda stream, tensors, addresses: copies.launch(side, addresses)

    def _bind_timed_copies(self, action: QueueLaunch) -> EnqueueOperation:
        """Bind copies enqueued one by one, with events before and behind each chunk."""
        side = self._workspace.stream(action.queue)
        parts: list[tuple[CopyQueue, TimedOperation | None]] = []
        for operation in action.operations:
            steps = copy_steps(self._binding.addresses, (operation,))
            for is_chunk, run in groupby(steps, lambda step: isinstance(step, CopyStep)):
                parts.append((CopyQueue(tuple(run)), self._new_timing(operation) if is_chunk else None))

        def enqueue(stream: torch.cuda.Stream, tensors: TensorsByName, addresses: Addresses) -> None:
            for part, timed in parts:
                with nullcontext() if timed is None else timed.on(side):
                    part.issue(side.cuda_stream, addresses)

        return enqueue

    def _timed_prologue(self, launch: Callable[[int], None]) -> Callable[[int], None]:
        timed = self._new_timing(None)

        def launch_prologue(stream: int) -> None:
            with timed.on(None):
                launch(stream)

        return launch_prologue

    def _new_timing(self, operation: Operation | None) -> TimedOperation:
        timed = TimedOperation(operation, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self.timed.append(timed)
        return timed

    def _library_call(self, operation: Operation) -> BoundLibraryCall:
        """Return the cuBLAS or NCCL call. Beside tiles a collective's kernel is limited to the SMs that they leave."""
        plan, group = self._plan, self._workspace.group
        buffers = {buffer.name: buffer for buffer in plan.schedule.buffers}
        if is_permuted(operation, buffers):
            return permuted_collective_call(operation, buffers, group, most_sms(plan, operation))
        if isinstance(operation, Collective):
            group = subgroup(group, operation.ranks, most_sms(plan, operation))
        return call_of(operation, plan, self._shapes, group)

    def _bind_library_operation(self, operation: Operation) -> EnqueueOperation:
        """Bind a cuBLAS or NCCL call with its waits and notifies: by stream operations on a side stream, by kernels on
        the caller's. Collectives are enqueued in the schedule's order, the same on all ranks."""
        timed, workspace_buffers = self._new_timing(operation) if self._is_traced else None, self._workspace_buffers
        run = self._library_call(operation)
        addresses = self._binding.addresses
        writes = tuple(write_steps(addresses, operation))

        def call(stream: torch.cuda.Stream, tensors: TensorsByName) -> None:
            if timed is None:
                run({**tensors, **workspace_buffers})
            else:
                with timed.on(stream):
                    run({**tensors, **workspace_buffers})

        if operation.queue in queues_beside(self._plan):
            side, waits = self._workspace.stream(operation.queue), tuple(wait_steps(addresses, operation))

            def enqueue_on_side(stream: torch.cuda.Stream, tensors: TensorsByName, addresses: Addresses) -> None:
                for step in waits:
                    driver.wait_value(side.cuda_stream, step.address, step.value)
                with torch.cuda.stream(side):
                    call(side, tensors)
                for write in writes:
                    driver.write_value(side.cuda_stream, write.address, write.value)

            return enqueue_on_side
        wait, notified = self._waits.of(operation), tuple(write.address for write in writes)
        notify = Launch(notify_call(notified, self._workspace.device)).start if notified else None

        def enqueue(stream: torch.cuda.Stream, tensors: TensorsByName, addresses: Addresses) -> None:
            wait(stream.cuda_stream)
            call(stream, tensors)
            if notify is not None:
                notify(stream.cuda_stream)

        return enqueue


def side_queues(plan: Plan, rank: int) -> list[str]:
    """Return the queues that a rank launches on side streams, in launch order."""
    return [action.queue for action in launch_order(plan, rank) if action.queue in queues_beside(plan)]


def bind_with_prologue(
    plan: Plan, workspace: Workspace, example: TensorsByName, is_traced: bool = False
) -> PlanRun[BoundPlan]:
    """Bind a plan, whose calls have a prologue, to a workspace. Collective if that must grow.

    is_traced: kernels record when each tile ran, and events when other operations did (runtime/gpu/trace.py). A traced
    call is enqueued one by one, never launched as a graph.
    """
    rank = workspace.group.rank
    create_subgroups(workspace.group, plan.schedule.of_rank(rank), partial(most_sms, plan))
    bound = BoundPlan(plan, workspace, example, is_traced)
    bound.prepare({name: tensor.data_ptr() for name, tensor in example.items()})
    return PlanRun(workspace, bound, side_queues(plan, rank), not is_traced and may_replay(plan))


def bind(plan: Plan, group: Group, example: TensorsByName) -> PlanRun[Any] | LibraryRun:
    """Bind a plan on this rank's GPU. example: tensors as of a call.

    Collective if the plan is the first that needs the group's workspace, or makes it grow.
    """
    if is_library_plan(plan):
        return LibraryRun(plan, group, example)
    workspace = Workspace.of(group, example["w"].device)
    if plan.schedule.reuse == ECHOES:
        packed = PackedPlan(plan, workspace, example)
        return PlanRun(workspace, packed, (), packed.may_replay)
    return bind_with_prologue(plan, workspace, example)
