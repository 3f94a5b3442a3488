"""Author's kernels on GPUs: a fused kernel computes the tiles of a plan; all else is bound as of any plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton

from overweave.compiler.emit.emit import PLACES
from overweave.errors import ScheduleError
from overweave.ir.plan import AUTHOR_KERNEL, Plan
from overweave.memory.cuda.workspace import Workspace
from overweave.memory.device.copy import BETWEEN_SHARED_BYTES
from overweave.memory.group import Group
from overweave.memory.lower import slice_targets
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
from overweave.runtime.gpu.bound import BoundPlan, free_sms
from overweave.runtime.gpu.call_frame import PlanRun
from overweave.runtime.gpu.launch import sides_of
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.gpu.replays import may_replay
from overweave.runtime.kernel_calls.bind import Binding, Tensors
from overweave.runtime.kernel_calls.call import KernelCall, Moving, moving, table_tensor

_ARGUMENT = "argument "  # stands before the names of a kernel's arguments, among those of buffers, which have no space


class FusedTiles:
    """The fused kernel of a plan, and arguments that it is compiled for."""

    def __init__(self, kernel: AuthoredKernel, given: Mapping[str, Any]) -> None:
        self._kernel, self._given = kernel, given

    def all_started(self, binding: Binding) -> WaitStep | None:
        """A block of a kernel without a loop takes one tile, and gets its SM last if that is the last tile."""
        if self._kernel.is_persistent:
            return None
        engines = {one.queue: one.engine for one in binding.plan.realization.engines}
        tables = (table for table in binding.plan.tile_orders if table.rank == binding.rank)
        count = sum(tiles_and_parts(one.rows)[0] for one in tables if engines[one.queue] == AUTHOR_KERNEL)
        return WaitStep(binding.workspace.claims.data_ptr(), count)

    def launch(self, binding: Binding, queue: str) -> Launch | None:
        """The launch of the kernel, compiled for the arguments that it is bound with."""
        kernel, plan, workspace, rank = self._kernel, binding.plan, binding.workspace, binding.rank
        rows = plan.tile_order(rank, queue).rows
        tiles, parts = tiles_and_parts(rows)
        if not tiles:
            return None
        signals, words, limits, world_size = binding.protocol
        buffers = binding.addresses.layout.buffers
        arguments = kernel.arguments(self._given, lambda name: binding.own(name) if name in buffers else None)
        self._stand_in(arguments, binding)
        table = table_tensor(rows, workspace.device)
        arguments |= protocol_arguments([table, workspace.claims, signals, words, limits], tiles, parts, world_size)
        arguments |= slice_arguments(binding.table(slice_targets(binding.addresses, rank, queue)), plan, rank, queue)
        arguments |= self._places(binding, queue) if kernel.away is not None else {}
        copy = plan.realization.copy
        beside = (copy.programs if copy else 0) + plan.realization.library_sms
        most = free_sms(workspace.device, beside) if kernel.is_persistent else None
        call = KernelCall(kernel.function, _in_order(kernel.function, arguments), dict(kernel.options), tiles)
        launch = Launch(call, most)
        if "overweave_slices" in arguments and plan.realization.slices == "bulk":
            _check_shared(kernel.space.kernel, launch.compiled.metadata.shared, workspace.device)
        return launch

    def _stand_in(self, arguments: dict[str, Any], binding: Binding) -> None:
        """Puts stand-ins for the caller's own tensors among the arguments in their place."""
        for name, value in list(arguments.items()):
            tensor = tensor_of(value)
            if tensor is not None and value is self._given.get(name):
                stand = moving(tensor)
                binding.moved.append((_ARGUMENT + name, stand))
                arguments[name] = _standing(value, stand)

    def _places(self, binding: Binding, queue: str) -> dict[str, torch.Tensor]:
        """Where tiles store at peers."""
        assert self._kernel.away is not None
        plan, bases, offsets, rank = (
            binding.plan,
            binding.heap.addresses,
            binding.addresses.layout.buffers,
            binding.rank,
        )
        own = bases[rank] + offsets[self._kernel.places[self._kernel.away.parameter][1]]
        itemsize = getattr(torch, plan.realization.dtype).itemsize

        def distance(place: Place) -> int:
            buffer, rank, rows = place
            between: int = (bases[rank] + offsets[buffer] - own) // itemsize
            return between + rows * plan.schedule.buffer(buffer).cols

        operations = (one for one in plan.schedule.of_rank(rank) if one.queue == queue)
        rows = place_rows(operations, self._kernel, plan.schedule.world_size, distance, lambda rank: bases[rank])
        return {PLACES: binding.table(rows)}


class AuthoredRun(PlanRun[BoundPlan]):
    """A plan and its kernel bound to a workspace. A call enqueues its work on the current stream and returns."""

    def __init__(self, plan: Plan, workspace: Workspace, kernel: AuthoredKernel, given: Mapping[str, Any]) -> None:
        make_parts(workspace.group, plan.schedule.of_rank(workspace.group.rank))
        bound = BoundPlan(plan, workspace, exchanged_tensors(plan, kernel, given), author=FusedTiles(kernel, given))
        super().__init__(workspace, bound, sides_of(plan, workspace.group.rank), may_replay(plan))

    @classmethod
    def bind(cls, plan: Plan, group: Group, kernel: AuthoredKernel, given: Mapping[str, Any]) -> AuthoredRun:
        """Ready to run; `given`: arguments as it will be called with. Collective: all compile before any spins."""
        tensor = next(tensor for tensor in map(tensor_of, given.values()) if tensor is not None)
        workspace = Workspace.of(group, tensor.device)
        return cls(plan, workspace, kernel, given)

    def __call__(self, given: Mapping[str, Any], inputs: Tensors, outputs: Tensors) -> None:  # type: ignore[override]
        """inputs, outputs: what is exchanged, by tensor. Raises PeerError for what went wrong in an earlier call."""
        tensors = {**inputs, **outputs}
        addresses = addresses_of(tensors, given)
        super().__call__(tensors, addresses)


def addresses_of(tensors: Tensors, given: Mapping[str, Any]) -> dict[str, int]:
    """Where the tensors of a call lie: those that are exchanged, and those that the kernel is given."""
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for name, value in given.items():
        tensor = tensor_of(value)
        if tensor is not None:
            addresses[_ARGUMENT + name] = tensor.data_ptr()
    return addresses


def exchanged_tensors(plan: Plan, kernel: AuthoredKernel, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The caller's tensors that are exchanged, as the matrices that the schedule knows."""
    found = {tensor: tensor_of(given[parameter]) for parameter, (tensor, _) in kernel.places.items()}
    return {name: one.view(-1, plan.schedule.buffer(name).cols) for name, one in found.items() if one is not None}


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
