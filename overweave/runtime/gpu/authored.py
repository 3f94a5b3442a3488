"""Author's kernels on GPUs: the fused kernel beside copies and library calls, bound once to each slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import triton

from overweave.compiler.emit.emit import PLACES
from overweave.errors import ScheduleError
from overweave.ir.launch.order import Action, launch_order
from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import AUTHOR_KERNEL, COPY_ENGINE, COPY_KERNEL, LIBRARY, REDUCE_KERNEL, SPINNING, Plan
from overweave.ir.schedule import INPUT, OUTPUT, Apply, Operation, Put, Reduce, Region
from overweave.ir.tile_order import TileRow
from overweave.ir.words import COPY_WORD_BYTES
from overweave.kernels.arguments import SignalWords, TileQueue
from overweave.memory.cuda import driver
from overweave.memory.cuda.copy_engine import CopyQueue
from overweave.memory.cuda.workspace import Slot, Workspace
from overweave.memory.device.copy import BETWEEN_SHARED_BYTES
from overweave.memory.group import Group
from overweave.memory.layout import lay_out
from overweave.memory.lower import (
    SlotAddresses,
    copy_steps,
    copy_targets,
    reduction_operands,
    slice_targets,
    wait_steps,
    widths_of,
    write_steps,
)
from overweave.memory.steps import WaitStep
from overweave.memory.subgroups import make_parts
from overweave.runtime.authored import (
    AuthoredKernel,
    Place,
    place_rows,
    protocol_arguments,
    slice_arguments,
    tensor_of,
    tiles_and_parts,
)
from overweave.runtime.gpu.call_frame import SlotCalls
from overweave.runtime.gpu.head import head_of
from overweave.runtime.gpu.kernels.arguments import Moving, moving, table_tensor
from overweave.runtime.gpu.kernels.kernels import (
    Launch,
    copy_launch,
    reduction_launch,
)
from overweave.runtime.gpu.kernels.matmul_call import programs_for
from overweave.runtime.gpu.kernels.tile_call import Summing
from overweave.runtime.gpu.launch import behind_sides
from overweave.runtime.gpu.library_beside import library_beside
from overweave.runtime.gpu.replays import Places, Replays, may_replay
from overweave.runtime.gpu.waits import PlanWaits
from overweave.runtime.library.library import run_operation

Tensors = Mapping[str, torch.Tensor]
Enqueue = Callable[[torch.cuda.Stream, Tensors, Mapping[str, Any]], None]


class AuthoredSlot:
    """A plan and its kernel bound to one slot. begin: the head of a call; enqueue: what each action does."""

    def __init__(
        self, plan: Plan, workspace: Workspace, slot: Slot, kernel: AuthoredKernel, given: Mapping[str, Any]
    ) -> None:
        self._plan, self._workspace, self._slot, self._kernel = plan, workspace, slot, kernel
        self._rank = workspace.group.rank
        self._dtype = getattr(torch, plan.realization.dtype)
        self._layout = lay_out(plan.schedule, plan.realization.dtype)
        self._addresses = SlotAddresses(plan.schedule, plan.realization.dtype, self._layout, slot.bases)
        self.begin, self._signals, self._words = head_of(workspace, slot, self._layout.signals)
        self._waits = PlanWaits(plan, self._rank, self._layout, [self._signals, self._words, workspace.limits])
        self.replays = Replays()
        self._queues: list[tuple[int, CopyQueue]] = []
        self._started: WaitStep | None = None  # that a kernel which pushes has all its programs on their SMs
        actions = launch_order(plan, self._rank)
        in_order = (
            behind_sides(plan, workspace, action, actions[:at], self._bound(action, given))
            for at, action in enumerate(actions)
        )
        self.enqueue: tuple[Enqueue, ...] = (*in_order, *self._waits.at_end())

    def prepare(self, addresses: Mapping[str, int]) -> None:
        """Has the copy queues ready for tensors at these addresses: nothing of a call may be made once it has begun."""
        for side, copies in self._queues:
            copies.prepare(side, addresses)

    def _bound(self, action: Action, given: Mapping[str, Any]) -> Enqueue:
        if action.engine == COPY_ENGINE:
            return self._copies(action)
        if action.engine == LIBRARY:
            return self._library(action.operations[0])
        if action.engine == REDUCE_KERNEL:
            return self._sums(action)
        if action.engine == COPY_KERNEL:
            return self._pushes(action)
        return self._author(action.queue, given)

    def _sums(self, action: Action) -> Enqueue:
        """The ordered sums: behind the author's kernel, or beside its last tiles once the first own ones are stored,
        so that blocks of sums which wait keep none of its blocks from starting."""
        config, workspace = self._plan.realization.reduction, self._workspace
        assert config is not None
        rows = self._plan.tile_order(self._rank, action.queue).rows
        reduces = [operation for operation in action.operations if isinstance(operation, Reduce)]
        if not rows:
            return lambda stream, tensors, given: None
        addresses = reduction_operands(self._addresses, self._rank, action.queue)
        operands = torch.tensor(addresses, dtype=torch.int64, device=workspace.device)
        schedule = self._plan.schedule
        stored = (reduce.out.buffer for reduce in reduces if schedule.buffer(reduce.out.buffer).home == OUTPUT)
        target, cols = next(stored, None), schedule.buffer(reduces[0].out.buffer).cols
        out = Moving(operands.data_ptr(), self._dtype)  # nobody looks there if no sum is the caller's
        arguments = [operands, out, *self._tiles(rows, workspace.claims[1:]), cols]
        launch = reduction_launch(config, arguments, len(rows), widths_of(reduces), Summing())
        gate = self._gate(reduces[0], config.programs) if action.queue in queues_beside(self._plan) else None
        side = workspace.stream(action.queue).cuda_stream

        def enqueue(stream: torch.cuda.Stream, tensors: Tensors, given: Mapping[str, Any]) -> None:
            if target is not None:
                out.address = tensors[target].data_ptr()
            for step in gate or ():
                driver.wait_value(side, step.address, step.value)
            launch(stream.cuda_stream if gate is None else side)

        return enqueue

    def _tiles(self, rows: tuple[TileRow, ...], claims: torch.Tensor) -> tuple[TileQueue, SignalWords]:
        """The tiles of a kernel of ours, and what waits and signals."""
        workspace = self._workspace
        trace = torch.zeros(1, dtype=torch.int64, device=workspace.device)
        queue = TileQueue(table_tensor(rows, workspace.device), claims, trace, len(rows))
        return queue, SignalWords(self._signals, self._words, workspace.limits, workspace.group.world_size)

    def _pushes(self, action: Action) -> Enqueue:
        """Puts by a kernel, on a stream of its own. Tiles wait for peers, and peers for these: so they have their SMs
        first. Those of what tiles store follow the first of these tiles."""
        config, workspace = self._plan.realization.copy, self._workspace
        assert config is not None
        rows = self._plan.tile_order(self._rank, action.queue).rows
        read = next((part.buffer for operation in action.operations for part in operation.reads), None)
        if not rows or read is None:
            raise ScheduleError(f"push queue {action.queue}", "it moves nothing", "Use mover=copy_engine")
        addresses = copy_targets(self._addresses, self._rank, action.queue)
        targets = torch.tensor(addresses, dtype=torch.int64, device=workspace.device)
        source, cols = Moving(0, torch.int32), self._plan.schedule.buffer(read).cols
        claims = workspace.claims[2:]
        first = next((one for one in action.operations if isinstance(one, Put) and one.waits), None)
        gate = self._gate(first, config.programs) if first else []
        if not first:
            self._started = WaitStep(claims.data_ptr(), min(config.programs, len(rows)))
        words = cols * self._dtype.itemsize // COPY_WORD_BYTES
        arguments = [targets, source, *self._tiles(rows, claims), words]
        launch, side = copy_launch(config, arguments, len(rows), False), workspace.stream(action.queue).cuda_stream

        own = self._own(read).data_ptr() if read in self._layout.buffers else None

        def enqueue(stream: torch.cuda.Stream, tensors: Tensors, given: Mapping[str, Any]) -> None:
            source.address = tensors[read].data_ptr() if own is None else own
            for step in gate:
                driver.wait_value(side, step.address, step.value)
            launch(side)

        return enqueue

    def _gate(self, first: Operation, blocks: int) -> list[WaitStep]:
        """What the first sum, or push, waits for of its own rank's tiles: then every block of the kernel that computes
        them has its SM. A block of a kernel without a loop takes one tile, and gets its SM last if that is the last
        tile; blocks that are too few to take every SM need not wait for it."""
        tiles = (operation for operation in self._plan.schedule.of_rank(self._rank) if isinstance(operation, Apply))
        mine = (notify for tile in tiles for notify in tile.notifies if notify.rank == self._rank)
        announced = {(notify.pad, notify.signal) for notify in mine}
        waits = [wait for wait in first.waits if (wait.pad, wait.signals[0]) in announced]
        if not waits:
            asked, cure = "run beside the tiles", "Give the queue `after`, or let it wait for own tiles"
            raise ScheduleError(asked, f"{first.name} waits for none: it could take the SMs they need", cure)
        gate = [step for wait in waits for step in wait_steps(self._addresses, first, wait)]
        if not self._kernel.is_persistent and blocks > SPINNING:
            engines = {one.queue: one.engine for one in self._plan.realization.engines}
            tables = (table for table in self._plan.tile_orders if table.rank == self._rank)
            count = sum(tiles_and_parts(one.rows)[0] for one in tables if engines[one.queue] == AUTHOR_KERNEL)
            gate.append(WaitStep(self._workspace.claims.data_ptr(), count))
        return gate

    def _author(self, queue: str, given: Mapping[str, Any]) -> Enqueue:
        """The fused kernel, compiled for the arguments that it is bound with."""
        kernel, workspace = self._kernel, self._workspace
        rows = self._plan.tile_order(self._rank, queue).rows
        tiles, parts = tiles_and_parts(rows)
        if not tiles:
            return lambda stream, tensors, given: None
        arrays = [table_tensor(rows, workspace.device), workspace.claims, self._signals, self._words, workspace.limits]
        arguments = kernel.arguments(given, lambda name: self._own(name) if name in self._layout.buffers else None)
        stands: dict[str, Moving] = {}
        for name, value in arguments.items():
            tensor = tensor_of(value)
            if tensor is not None and value is given.get(name):  # the caller's own
                stands[name] = moving(tensor)
                arguments[name] = _standing(value, stands[name])
        arguments |= protocol_arguments(arrays, tiles, parts, workspace.group.world_size)
        moves = slice_targets(self._addresses, self._rank, queue)
        targets = torch.tensor(moves, dtype=torch.int64, device=workspace.device)
        arguments |= slice_arguments(targets, self._plan, self._rank, queue)
        arguments |= self._places(queue) if kernel.away is not None else {}
        copy = self._plan.realization.copy
        beside = (copy.programs if copy else 0) + self._plan.realization.library_sms
        programs = programs_for(tiles, workspace.device, beside) if kernel.is_persistent else tiles
        launch = Launch(kernel.function, programs, _in_order(kernel.function, arguments), dict(kernel.options))
        if "overweave_slices" in arguments and self._plan.realization.slices == "bulk":
            _check_shared(kernel.space.kernel, launch.compiled.metadata.shared, workspace.device)

        def enqueue(stream: torch.cuda.Stream, tensors: Tensors, given: Mapping[str, Any]) -> None:
            for name, stand in stands.items():
                stand.address = tensor_of(given[name]).data_ptr()  # type: ignore[union-attr]
            if self._started is not None:
                driver.wait_value(stream.cuda_stream, self._started.address, self._started.value)
            launch(stream.cuda_stream)

        return enqueue

    def _places(self, queue: str) -> dict[str, torch.Tensor]:
        """Where tiles store at peers."""
        assert self._kernel.away is not None
        bases, offsets, schedule = self._slot.bases, self._layout.buffers, self._plan.schedule
        own = bases[self._rank] + offsets[self._kernel.places[self._kernel.away.parameter][1]]

        def distance(place: Place) -> int:
            buffer, rank, rows = place
            between: int = (bases[rank] + offsets[buffer] - own) // self._dtype.itemsize
            return between + rows * schedule.buffer(buffer).cols

        operations = (one for one in schedule.of_rank(self._rank) if one.queue == queue)
        rows = place_rows(operations, self._kernel, schedule.world_size, distance, lambda rank: bases[rank])
        return {PLACES: torch.tensor(rows, dtype=torch.int64, device=self._workspace.device)}

    def _copies(self, action: Action) -> Enqueue:
        copies = CopyQueue(copy_steps(self._addresses, action.operations), self._workspace.settle)
        side = self._workspace.stream(action.queue).cuda_stream
        self._queues.append((side, copies))

        def enqueue(stream: torch.cuda.Stream, tensors: Tensors, given: Mapping[str, Any]) -> None:
            copies.launch(side, {name: tensor.data_ptr() for name, tensor in tensors.items()})

        return enqueue

    def _library(self, operation: Operation) -> Enqueue:
        wait, writes = self._waits.of(operation), tuple(write_steps(self._addresses, operation))
        group = self._workspace.group

        def call(stream: torch.cuda.Stream, tensors: Tensors, given: Mapping[str, Any]) -> None:
            run_operation(operation, lambda region: self._view(tensors, region), group)

        if operation.queue in queues_beside(self._plan):
            return library_beside(self._workspace, self._addresses, operation, call)

        def enqueue(stream: torch.cuda.Stream, tensors: Tensors, given: Mapping[str, Any]) -> None:
            wait(stream.cuda_stream)
            call(stream, tensors, given)
            for write in writes:
                driver.write_value(stream.cuda_stream, write.address, write.value)

        return enqueue

    def _own(self, name: str) -> torch.Tensor:
        """The own instance of a workspace buffer; a caller's tensor stays what it is."""
        buffer = self._plan.schedule.buffer(name)
        return self._slot.view(self._layout.buffers[name], (buffer.rows, buffer.cols), self._dtype)

    def _view(self, tensors: Tensors, region: Region) -> torch.Tensor:
        buffer = self._plan.schedule.buffer(region.buffer)
        whole = tensors[buffer.name] if buffer.home in (INPUT, OUTPUT) else self._own(buffer.name)
        return whole[slice(*region.rows), slice(*region.cols)]


class AuthoredRun(SlotCalls[AuthoredSlot]):
    """A plan and its kernel bound to a workspace. A call enqueues its work on the current stream and returns."""

    def __init__(self, plan: Plan, workspace: Workspace, kernel: AuthoredKernel, given: Mapping[str, Any]) -> None:
        make_parts(workspace.group, plan.schedule.of_rank(workspace.group.rank))
        leased = workspace.lease(lay_out(plan.schedule, plan.realization.dtype))
        slots = [AuthoredSlot(plan, workspace, slot, kernel, given) for slot in leased]
        actions = launch_order(plan, workspace.group.rank)
        sides = [action.queue for action in actions if action.queue in queues_beside(plan)]
        super().__init__(workspace, slots, sides, may_replay(plan))

    @classmethod
    def bind(cls, plan: Plan, group: Group, kernel: AuthoredKernel, given: Mapping[str, Any]) -> AuthoredRun:
        """Ready to run; `given`: arguments as it will be called with. Collective: all compile before any spins."""
        tensor = next(tensor for tensor in map(tensor_of, given.values()) if tensor is not None)
        workspace = Workspace.of(group, tensor.device)
        return cls(plan, workspace, kernel, given)

    def __call__(self, given: Mapping[str, Any], inputs: Tensors, outputs: Tensors) -> None:
        """inputs, outputs: what is exchanged, by tensor. Raises PeerError for what went wrong in an earlier call."""
        tensors = {**inputs, **outputs}
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        self.run_in_turn(_places(given), addresses, (tensors, given))


def _places(given: Mapping[str, Any]) -> Places:
    """Where all the tensors of a call lie. Its numbers are those that it was bound with."""
    return tuple(tensor.data_ptr() for tensor in map(tensor_of, given.values()) if tensor is not None)


def _check_shared(name: str, tiles_bytes: int, device: torch.device) -> None:
    """Bulk copies between tiles have shared memory of their own. Raises ScheduleError where both do not fit."""
    limit: int = triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    if tiles_bytes + BETWEEN_SHARED_BYTES > limit:
        found = f"its tiles take {tiles_bytes} bytes of shared memory, the copies {BETWEEN_SHARED_BYTES}, of {limit}"
        raise ScheduleError(f"let the tiles of {name} carry in bulk", found, "Use fewer stages, or mover=tiles")


def _standing(value: Any, stand: Moving) -> Any:
    """A tensor argument that may move from call to call."""
    return stand if isinstance(value, torch.Tensor) else replace(value, base=stand)


def _in_order(function: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """In the order of the kernel's parameters, defaults filled in."""
    known = function.signature.parameters
    return [arguments[name] if name in arguments else known[name].default for name in function.arg_names]
