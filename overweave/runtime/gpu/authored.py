"""Authors' kernels on GPUs: a fused kernel computes the tiles of a plan; the rest is bound as in any plan."""

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
from overweave.memory.group import Group, create_subgroups
from overweave.memory.lower import WaitStep
from overweave.runtime.authored import AuthoredKernel, exchanged_tensors, tensor_of
from overweave.runtime.gpu.bound import BoundPlan, free_sms, side_queues
from overweave.runtime.gpu.call_frame import PlanRun
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.gpu.replays import may_replay
from overweave.runtime.kernel_calls.author import author_call, count_rows
from overweave.runtime.kernel_calls.bind import Binding, TensorsByName
from overweave.runtime.kernel_calls.call import KernelCall, Moving, stand_in_for

_ARGUMENT = "argument "  # prefix of a kernel's argument names among buffer names, which contain no space


class FusedTiles:
    """The fused kernel of a plan, and the author's arguments that it is compiled for."""

    def __init__(self, kernel: AuthoredKernel, author_arguments: Mapping[str, Any]) -> None:
        self._kernel, self._author_arguments = kernel, author_arguments

    def blocks_resident(self, binding: Binding) -> WaitStep | None:
        """Return a wait until every block has an SM; None for a persistent kernel.

        A block of another kernel claims one tile: all blocks are resident once all tiles are claimed.
        """
        if self._kernel.is_persistent:
            return None
        engines = {one.queue: one.engine for one in binding.plan.realization.engines}
        tables = (table for table in binding.plan.tile_orders if table.rank == binding.rank)
        tiles = sum(count_rows(one.rows, APPLY) for one in tables if engines[one.queue] == AUTHOR_KERNEL)
        return WaitStep(binding.claims(AUTHOR_KERNEL).data_ptr(), tiles)

    def launch(self, binding: Binding, queue: str) -> Launch | None:
        """Compile the kernel for the bound arguments; return its launch, or None without tiles on this rank."""
        kernel, realization, device = self._kernel, binding.plan.realization, binding.workspace.device
        call = author_call(kernel, self._author_arguments, binding, queue)
        if call is None:
            return None
        self._stand_in(call.arguments, binding)
        sms_beside = (realization.copy.programs if realization.copy else 0) + realization.library_sms
        max_programs = free_sms(device, sms_beside) if kernel.is_persistent else None
        arguments = _in_parameter_order(kernel.function, call.arguments)
        kernel_call = KernelCall(kernel.function, arguments, dict(kernel.options), call.tiles)
        launch = Launch(kernel_call, max_programs)
        if "overweave_slices" in call.arguments and realization.slices == "bulk":
            _check_shared(kernel.space.kernel, launch.compiled.metadata.shared, device)
        return launch

    def _stand_in(self, arguments: dict[str, Any], binding: Binding) -> None:
        """Replace the caller's tensors among the arguments by stand-ins, whose addresses each call sets."""
        for name, value in list(arguments.items()):
            tensor = tensor_of(value)
            if tensor is not None and value is self._author_arguments.get(name):
                stand = stand_in_for(tensor)
                binding.stand_ins.append((_ARGUMENT + name, stand))
                arguments[name] = _with_stand_in(value, stand)


class AuthoredRun(PlanRun[BoundPlan]):
    """A plan and its kernel bound to a workspace. A call enqueues its work on the current stream and returns."""

    def __init__(
        self, plan: Plan, workspace: Workspace, kernel: AuthoredKernel, author_arguments: Mapping[str, Any]
    ) -> None:
        self._kernel = kernel
        create_subgroups(workspace.group, plan.schedule.of_rank(workspace.group.rank))
        example, tiles = exchanged_tensors(kernel, author_arguments), FusedTiles(kernel, author_arguments)
        bound = BoundPlan(plan, workspace, example, author=tiles)
        super().__init__(workspace, bound, side_queues(plan, workspace.group.rank), may_replay(plan))

    @classmethod
    def bind(cls, plan: Plan, group: Group, kernel: AuthoredKernel, author_arguments: Mapping[str, Any]) -> AuthoredRun:
        """Bind a kernel. author_arguments: as of a call. Collective: all ranks compile before any kernel waits."""
        tensor = next(tensor for tensor in map(tensor_of, author_arguments.values()) if tensor is not None)
        workspace = Workspace.of(group, tensor.device)
        return cls(plan, workspace, kernel, author_arguments)

    def __call__(self, author_arguments: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Enqueue a call. Raises PeerError if an earlier call failed."""
        tensors = exchanged_tensors(self._kernel, author_arguments)
        super().__call__(tensors, addresses_of(tensors, author_arguments))


def addresses_of(tensors: TensorsByName, author_arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the addresses of a call's communicated tensors and of the kernel's tensor arguments."""
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for name, value in author_arguments.items():
        tensor = tensor_of(value)
        if tensor is not None:
            addresses[_ARGUMENT + name] = tensor.data_ptr()
    return addresses


def _check_shared(name: str, tiles_bytes: int, device: torch.device) -> None:
    """Raise ScheduleError if shared memory cannot hold both the tiles and the buffers of bulk copies between tiles."""
    limit: int = triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    if tiles_bytes + BETWEEN_SHARED_BYTES > limit:
        found = f"its tiles take {tiles_bytes} bytes of shared memory, the copies {BETWEEN_SHARED_BYTES}, of {limit}"
        raise ScheduleError(f"let the tiles of {name} carry in bulk", found, "Use fewer stages, or mover=tiles")


def _with_stand_in(value: Any, stand: Moving) -> Any:
    """Return a tensor or descriptor argument with a stand-in, whose address may change from call to call."""
    return stand if isinstance(value, torch.Tensor) else replace(value, base=stand)


def _in_parameter_order(function: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """In the order of the kernel's parameters, defaults filled in."""
    known = function.signature.parameters
    return [arguments[name] if name in arguments else known[name].default for name in function.arg_names]
