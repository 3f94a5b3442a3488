"""Runs Plans on GPUs: copies beside the kernel, own shard in place, one `begin` at the head, nothing behind the end.

Everything that can be decided once is decided when a plan is bound: kernels are compiled and loaded, tables and graphs
built, addresses resolved, per slot. A call then costs a few launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch

from overweave.errors import ScheduleError
from overweave.ir.launch.gates import first_own_waits, gate_obstacle, waits_for_nothing
from overweave.ir.launch.order import Action, launch_order
from overweave.ir.launch.streams import queues_beside
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
from overweave.ir.schedule import ECHOES, INPUT, LOCAL, OUTPUT, Buffer, Operation
from overweave.memory.board.board import Board
from overweave.memory.cuda import driver
from overweave.memory.cuda.copy_engine import CopyQueue
from overweave.memory.cuda.workspace import Slot, Workspace
from overweave.memory.fast_empty import maker
from overweave.memory.group import Group
from overweave.memory.layout import lay_out
from overweave.memory.lower import SlotAddresses, copy_steps, refuse_permuted, wait_steps, write_steps
from overweave.memory.steps import CopyStep
from overweave.memory.subgroups import make_parts
from overweave.runtime.gpu.bind import AuthorTiles, SlotKernels, own_instance
from overweave.runtime.gpu.call_frame import SlotCalls
from overweave.runtime.gpu.kernels.kernels import tell_launch
from overweave.runtime.gpu.kernels.packed import PackedRun
from overweave.runtime.gpu.library_beside import library_beside
from overweave.runtime.gpu.replays import Replays, may_replay
from overweave.runtime.gpu.waits import PlanWaits
from overweave.runtime.library.calls import library_call, made_by
from overweave.runtime.library.library import with_room
from overweave.runtime.library.views import joined

Tensors = Mapping[str, torch.Tensor]
Addresses = dict[str, int]
Enqueue = Callable[[torch.cuda.Stream, Tensors, Addresses], None]


class Timed(NamedTuple):
    """Events around an operation of a traced plan, its waits left out; operation None: the head of the call."""

    operation: Operation | None
    begin: torch.cuda.Event
    end: torch.cuda.Event


def after_of(plan: Plan, queue: str) -> tuple[str, ...]:
    """The queues that a queue is after."""
    return next(one.after for one in plan.schedule.queues if one.name == queue)


def behind_sides(
    plan: Plan, workspace: Workspace, action: Action, earlier: tuple[Action, ...], enqueue: Callable[..., None]
) -> Callable[..., None]:
    """The same, behind what was enqueued earlier on streams of their own for queues that the action's is after.

    Whoever waits for peers is after its own pushes: its blocks must not hold the SMs that those need.
    """
    queue, launched = action.queue, {one.queue for one in earlier}
    names = [name for name in after_of(plan, queue) if name in launched and name in queues_beside(plan)]
    if not names or queue in queues_beside(plan):
        return enqueue
    sides, done = [workspace.stream(name) for name in names], torch.cuda.Event()

    def behind(stream: torch.cuda.Stream, *given: Any) -> None:
        for side in sides:
            done.record(side)
            stream.wait_event(done)
        enqueue(stream, *given)

    return behind


def before_sums(plan: Plan, rank: int, actions: tuple[Action, ...]) -> Operation | None:
    """The library call behind which sums follow on the same stream, if there is one that has peers to tell: a launch
    and its way through the GPU are saved where the sums' kernel tells them as it begins."""
    for call, sums in pairwise(actions):
        if (call.engine, sums.engine) == (LIBRARY, REDUCE_KERNEL) and sums.queue not in queues_beside(plan):
            if call.operations[0].notifies and plan.tile_order(rank, sums.queue).rows:
                return call.operations[0]
    return None


class BoundSlot:
    """A plan bound to one slot of a workspace. `enqueue`: what each of its actions does.

    Of a traced plan: `timed`, what ran outside of tile kernels, and `tables` of those (runtime/gpu/bind.py), in each
    call.
    """

    def __init__(
        self,
        plan: Plan,
        workspace: Workspace,
        slot: Slot,
        example: Tensors,
        traced: bool = False,
        author: AuthorTiles | None = None,
    ) -> None:
        actions = launch_order(plan, workspace.group.rank)
        self._plan, self._workspace, self._slot = plan, workspace, slot
        self._layout = lay_out(plan.schedule, plan.realization.dtype)
        self._addresses = SlotAddresses(plan.schedule, plan.realization.dtype, self._layout, slot.bases)
        self._before_sums = before_sums(plan, workspace.group.rank, actions)
        self._kernels = SlotKernels(plan, workspace, self._addresses, slot, example, traced, self._before_sums, author)
        self._waits = PlanWaits(plan, workspace.group.rank, self._layout, self._kernels.arrays)
        self._traced = traced
        self.timed: list[Timed] = []
        self._queues: list[tuple[int, CopyQueue]] = []
        self._own = self._own_buffers()
        self._shapes = {name: tuple(tensor.shape) for name, tensor in {**example, **self._own}.items()}
        self.replays = Replays()
        self.tables = self._kernels.traces
        self.begin: Callable[[int], None] = self._timed_begin() if traced else self._kernels.begin
        in_order = (self._in_order(action, actions[:at]) for at, action in enumerate(actions))
        self.enqueue: tuple[Enqueue, ...] = (*in_order, *self._waits.at_end())
        del self._plan, self._waits  # large, and bound

    def prepare(self, addresses: Addresses) -> None:
        """Has the copy queues ready for tensors at these addresses: nothing of a call may be made once it has begun."""
        for side, copies in self._queues:
            copies.prepare(side, addresses)

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        """This rank's buffers of the workspace, by name."""
        names = [each.name for each in self._plan.schedule.buffers if each.home not in (INPUT, OUTPUT)]
        return {name: own_instance(self._plan, self._addresses, self._slot, name) for name in names}

    def _in_order(self, action: Action, earlier: tuple[Action, ...]) -> Enqueue:
        return behind_sides(self._plan, self._workspace, action, earlier, self._bound(action))

    def _bound(self, action: Action) -> Enqueue:
        if action.engine == COPY_ENGINE:
            return self._timed_copies(action) if self._traced else self._copies(action)
        if action.engine == LIBRARY:
            return self._library(action.operations[0])
        if action.engine in (TILE_KERNEL, AUTHOR_KERNEL):
            return self._tiles()
        launch = self._kernels.reduce if action.engine == REDUCE_KERNEL else self._kernels.copy
        if action.queue in queues_beside(self._plan):
            return self._kernel_beside(action, launch)
        return lambda stream, tensors, addresses: launch(stream.cuda_stream, addresses)

    def _tiles(self) -> Enqueue:
        """The tile kernel. Tiles wait for peers, and peers for the pushes of this rank: where these wait for nothing
        themselves, they have their SMs first, whatever else runs on the GPU."""
        gate = self._kernels.copies_started if self._pushes_first() else None

        def enqueue(stream: torch.cuda.Stream, tensors: Tensors, addresses: Addresses) -> None:
            if gate is not None:
                driver.wait_value(stream.cuda_stream, gate.address, gate.value)
            self._kernels.tiles(stream.cuda_stream, addresses)

        return enqueue

    def _pushes_first(self) -> bool:
        """Whether a copy kernel runs beside the tiles and waits for none of them."""
        rank, engines = self._workspace.group.rank, self._plan.realization
        after = {queue.name: queue.after for queue in self._plan.schedule.queues}
        operations = self._plan.schedule.of_rank(rank)
        pushes = [op for op in operations if engines.engine_of(op.queue) == COPY_KERNEL and not after[op.queue]]
        return bool(pushes) and waits_for_nothing(pushes)

    def _kernel_beside(self, action: Action, launch: Callable[[int, Addresses], None]) -> Enqueue:
        """A kernel on a stream of its own, launched once the first own tiles that it waits for are stored.

        Then blocks of the tile kernel are running, and blocks of this one that wait cannot keep them from it. A
        reduction waits for the last tiles: it takes the SMs that those leave idle. Pushes have SMs that the tile
        kernel leaves to them; those that wait for nothing are launched ahead of it.
        """
        rank, first = self._workspace.group.rank, action.operations[0]
        obstacle = gate_obstacle(self._plan, rank, action.queue)
        if obstacle:
            cure = "Give it `after`, or let it wait for own results; `overweave verify` tells before a launch"
            raise ScheduleError(f"run queue {action.queue} beside others", obstacle, cure)
        waits = first_own_waits(self._plan, rank, action.queue)
        gate = [step for wait in waits for step in wait_steps(self._addresses, first, wait)]
        gate += [self._kernels.tiles_started] if self._kernels.tiles_started and self._may_hold_all(action) else []
        side = self._workspace.stream(action.queue).cuda_stream

        def enqueue(stream: torch.cuda.Stream, tensors: Tensors, addresses: Addresses) -> None:
            for step in gate:
                driver.wait_value(side, step.address, step.value)
            launch(side, addresses)

        return enqueue

    def _may_hold_all(self, action: Action) -> bool:
        """Whether blocks of a kernel are so many that tiles of others, one for each block, may find no SM."""
        realization = self._plan.realization
        config = realization.reduction if action.engine == REDUCE_KERNEL else realization.copy
        return config is not None and config.programs > SPINNING

    def _copies(self, action: Action) -> Enqueue:
        copies = CopyQueue(copy_steps(self._addresses, action.operations), self._workspace.settle)
        side = self._workspace.stream(action.queue).cuda_stream
        self._queues.append((side, copies))

        def enqueue(stream: torch.cuda.Stream, tensors: Tensors, addresses: Addresses) -> None:
            copies.launch(side, addresses)

        return enqueue

    def _timed_copies(self, action: Action) -> Enqueue:
        """The same, one by one, with events before and behind each chunk."""
        side = self._workspace.stream(action.queue)
        parts: list[tuple[CopyQueue, Timed | None]] = []
        for operation in action.operations:
            steps = copy_steps(self._addresses, (operation,))
            for is_chunk, run in groupby(steps, lambda step: isinstance(step, CopyStep)):
                parts.append((CopyQueue(tuple(run)), self._timing(operation) if is_chunk else None))

        def enqueue(stream: torch.cuda.Stream, tensors: Tensors, addresses: Addresses) -> None:
            for part, timed in parts:
                if timed is None:
                    part.issue(side.cuda_stream, addresses)
                else:
                    timed.begin.record(side)
                    part.issue(side.cuda_stream, addresses)
                    timed.end.record(side)

        return enqueue

    def _timed_begin(self) -> Callable[[int], None]:
        timed = self._timing(None)

        def begin(stream: int) -> None:
            timed.begin.record()
            self._kernels.begin(stream)
            timed.end.record()

        return begin

    def _timing(self, operation: Operation | None) -> Timed:
        timed = Timed(operation, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self.timed.append(timed)
        return timed

    def _library(self, operation: Operation) -> Enqueue:
        timed, stays = self._timing(operation) if self._traced else None, self._own
        library = library_call(operation, self._plan.problem, self._shapes, self._workspace.group)

        def call(stream: torch.cuda.Stream, tensors: Tensors, addresses: Addresses) -> None:
            if timed is not None:
                timed.begin.record(stream)
            library({**tensors, **stays})
            if timed is not None:
                timed.end.record(stream)

        if operation.queue in queues_beside(self._plan):
            return library_beside(self._workspace, self._addresses, operation, call)
        wait = self._waits.of(operation)
        told = tuple(step.address for step in write_steps(self._addresses, operation))
        tell = tell_launch(told, self._workspace.device) if told and operation is not self._before_sums else None

        def enqueue(stream: torch.cuda.Stream, tensors: Tensors, addresses: Addresses) -> None:
            wait(stream.cuda_stream)
            call(stream, tensors, addresses)
            if tell is not None:
                tell(stream.cuda_stream)

        return enqueue


def sides_of(plan: Plan, rank: int) -> list[str]:
    """The queues that a rank launches on streams of their own, in the order of their launches."""
    return [action.queue for action in launch_order(plan, rank) if action.queue in queues_beside(plan)]


class CudaRun(SlotCalls[BoundSlot]):
    """A plan bound to a workspace: call it with the tensors of every input and output buffer.

    Binding is collective if the workspace must grow. A call enqueues its work on the current stream and returns; under
    capture it is captured. Raises PeerError for what went wrong in an earlier call.

    traced: kernels write down when each tile ran, and events when everything else did (runtime/trace/gpu.py). Copies
    are then enqueued one by one, never captured.
    """

    def __init__(self, plan: Plan, workspace: Workspace, example: Tensors, traced: bool = False) -> None:
        make_parts(workspace.group, plan.schedule.of_rank(workspace.group.rank))
        leased = workspace.lease(lay_out(plan.schedule, plan.realization.dtype))
        slots = [BoundSlot(plan, workspace, slot, example, traced) for slot in leased]
        addresses = {name: tensor.data_ptr() for name, tensor in example.items()}
        for bound in slots:
            bound.prepare(addresses)
        # What a trace times is enqueued one by one.
        super().__init__(workspace, slots, sides_of(plan, workspace.group.rank), not traced and may_replay(plan))

    def __call__(self, tensors: Tensors) -> None:
        """Runs the plan once. `tensors`: by buffer name, shaped as the plan's problem says."""
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        self.run_in_turn(tuple(addresses.values()), addresses, (tensors, addresses))


class LibraryRun:
    """A plan that only a library runs: no signals, no workspace; local buffers come from torch's allocator.

    makes: results that its matmuls make, unless it is given them.
    """

    was_captured = False  # a graph that captured it keeps its own memory

    def __init__(self, plan: Plan, group: Group, example: Tensors) -> None:
        problem, shapes = plan.problem, {name: tuple(tensor.shape) for name, tensor in example.items()}
        local = [each for each in plan.schedule.buffers if each.home == LOCAL]
        shapes |= {each.name: (each.rows, each.cols) for each in local}
        make_parts(group, plan.schedule.of_rank(group.rank))
        operations = [joined(each, shapes) for each in plan.schedule.of_rank(group.rank)]
        made = {made_by(each, problem, shapes) for each in operations}
        self.makes = frozenset(name for name in made if name in example)
        self._calls = [library_call(each, problem, shapes, group) for each in operations]
        self._make, self._ranks = maker(example["w"].device), group.world_size
        self._local = [
            (each.name, (each.rows, each.cols), _dtype(each, problem.dtype))
            for each in local
            if each.name not in made or each.rows % group.world_size  # as of `with_room`
        ]
        self._board = Board.of(group)
        self._board.probes_rarely = True  # a collective that waits for a dead peer ends by its library's watchdog

    def __call__(self, tensors: dict[str, torch.Tensor]) -> None:
        """Runs the plan once, on the current stream. What it makes is added to the tensors."""
        for name, shape, dtype in self._local:
            tensors[name] = with_room(self._make, shape, dtype, self._ranks)
        for call in self._calls:
            call(tensors)
        if not self._board.is_watched:  # no workspace, whose end would say so
            self._board.finish()  # what is under way is the library's, and its watchdog's


def _dtype(buffer: Buffer, otherwise: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, buffer.dtype or otherwise)
    return found


def bind(plan: Plan, group: Group, example: Tensors) -> CudaRun | LibraryRun | PackedRun:
    """The plan ready to run on this rank's GPU; `example` are tensors as it will be called with.

    Collective if the plan is the first that needs the group's workspace, or makes it grow.
    """
    refuse_permuted(plan.schedule)
    is_library = all(assignment.engine == LIBRARY for assignment in plan.realization.engines)
    if is_library and not plan.schedule.pads and not queues_beside(plan):
        return LibraryRun(plan, group, example)
    workspace = Workspace.of(group, example["w"].device)
    if plan.schedule.reuse == ECHOES:
        return PackedRun(plan, workspace, example)
    return CudaRun(plan, workspace, example)
