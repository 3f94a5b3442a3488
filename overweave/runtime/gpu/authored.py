"""Author's kernels on GPUs: a fused kernel computes the tiles of a plan; all else is bound as of any plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton

from overweave.errors import ScheduleError
from overweave.ir.plan import AUTHOR_KERNEL, Plan
from overweave.ir.tile_order import APPLY
from overweave.memory.cuda.workspace import Workspace
from overweave.memory.device.copy import BETWEEN_SHARED_BYTES
from overweave.memory.group import Group
from overweave.memory.steps import WaitStep
from overweave.memory.subgroups import create_subgroups
from overweave.runtime.authored import AuthoredKernel, tensor_of
from overweave.runtime.gpu.bound import BoundPlan, free_sms
from overweave.runtime.gpu.call_frame import PlanRun
from overweave.runtime.gpu.launch import side_queues
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.gpu.replays import may_replay
from overweave.runtime.kernel_calls.author import author_call, count_rows
from overweave.runtime.kernel_calls.bind import Binding, TensorsByName
from overweave.runtime.kernel_calls.call import KernelCall, Moving, stand_in_for

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
        tiles = sum(count_rows(one.rows, APPLY) for one in tables if engines[one.queue] == AUTHOR_KERNEL)
        return WaitStep(binding.claims(AUTHOR_KERNEL).data_ptr(), tiles)

    def launch(self, binding: Binding, queue: str) -> Launch | None:
        """The launch of the kernel, compiled for the arguments that it is bound with."""
        kernel, realization, device = self._kernel, binding.plan.realization, binding.workspace.device
        made = author_call(kernel, self._given, binding, queue)
        if made is None:
            return None
        self._stand_in(made.arguments, binding)
        beside = (realization.copy.programs if realization.copy else 0) + realization.library_sms
        most = free_sms(device, beside) if kernel.is_persistent else None
        arguments = _in_parameter_order(kernel.function, made.arguments)
        call = KernelCall(kernel.function, arguments, dict(kernel.options), made.tiles)
        launch = Launch(call, most)
        if "overweave_slices" in made.arguments and realization.slices == "bulk":
            _check_shared(kernel.space.kernel, launch.compiled.metadata.shared, device)
        return launch

    def _stand_in(self, arguments: dict[str, Any], binding: Binding) -> None:
        """Puts stand-ins for the caller's own tensors among the arguments in their place."""
        for name, value in list(arguments.items()):
            tensor = tensor_of(value)
            if tensor is not None and value is self._given.get(name):
                stand = stand_in_for(tensor)
                binding.moved.append((_ARGUMENT + name, stand))
                arguments[name] = _with_stand_in(value, stand)


class AuthoredRun(PlanRun[BoundPlan]):
    """A plan and its kernel bound to a workspace. A call enqueues its work on the current stream and returns."""

    def __init__(self, plan: Plan, workspace: Workspace, kernel: AuthoredKernel, given: Mapping[str, Any]) -> None:
        create_subgroups(workspace.group, plan.schedule.of_rank(workspace.group.rank))
        bound = BoundPlan(plan, workspace, exchanged_tensors(plan, kernel, given), author=FusedTiles(kernel, given))
        super().__init__(workspace, bound, side_queues(plan, workspace.group.rank), may_replay(plan))

    @classmethod
    def bind(cls, plan: Plan, group: Group, kernel: AuthoredKernel, given: Mapping[str, Any]) -> AuthoredRun:
        """Ready to run; `given`: arguments as it will be called with. Collective: all compile before any spins."""
        tensor = next(tensor for tensor in map(tensor_of, given.values()) if tensor is not None)
        workspace = Workspace.of(group, tensor.device)
        return cls(plan, workspace, kernel, given)

    def __call__(self, given: Mapping[str, Any], inputs: TensorsByName, outputs: TensorsByName) -> None:  # type: ignore[override]
        """inputs, outputs: what is exchanged, by tensor. Raises PeerError for what went wrong in an earlier call."""
        tensors = {**inputs, **outputs}
        addresses = addresses_of(tensors, given)
        super().__call__(tensors, addresses)


def addresses_of(tensors: TensorsByName, given: Mapping[str, Any]) -> dict[str, int]:
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


def _with_stand_in(value: Any, stand: Moving) -> Any:
    """A tensor argument that may move from call to call."""
    return stand if isinstance(value, torch.Tensor) else replace(value, base=stand)


def _in_parameter_order(function: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """In the order of the kernel's parameters, defaults filled in."""
    known = function.signature.parameters
    return [arguments[name] if name in arguments else known[name].default for name in function.arg_names]
