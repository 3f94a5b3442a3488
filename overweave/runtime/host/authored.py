"""Authors' kernels on CPU ranks: the fused kernel interpreted, with real signals between processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overweave.ir.exchange import addresses_peers
from overweave.ir.plan import AUTHOR_KERNEL, Plan
from overweave.memory.board.board import Board
from overweave.memory.group import Group
from overweave.memory.host.workspace import HostWorkspace
from overweave.runtime.authored import AuthoredKernel, exchanged_tensors, tensor_of
from overweave.runtime.host.emulate import HostProgram, IsDone
from overweave.runtime.host.interpreted import PROGRAMS, InterpretedCall
from overweave.runtime.kernel_calls.author import author_call
from overweave.runtime.scheduler import PendingStep


class HostAuthoredRun:
    """A plan and its kernel, bound to this rank's group. Calls follow each other in the same sequence on all ranks."""

    def __init__(self, plan: Plan, group: Group, kernel: AuthoredKernel) -> None:
        self._group, self._kernel = group, kernel
        if addresses_peers(plan.schedule):
            Board.of(group).islands.require_one(f"run {plan.name} on {group.world_size} ranks")
        self._program = HostProgram.of(plan, group.rank, AuthoredCall.kernel_queues(plan))

    @classmethod
    def bind(cls, plan: Plan, group: Group, kernel: AuthoredKernel, arguments: Mapping[str, Any]) -> HostAuthoredRun:
        """Bind a kernel. arguments: the author's arguments, as of a call."""
        return cls(plan, group, kernel)

    def __call__(self, arguments: Mapping[str, Any]) -> None:
        """Run one call. arguments: the author's. Raises PeerError; all outputs are NaN then."""
        workspace = HostWorkspace.of(self._group)
        call = AuthoredCall(self._program, self._group, workspace, self._kernel, arguments)
        exchanged = exchanged_tensors(self._kernel, arguments)
        written = {store.tensor: tensor_of(arguments[store.parameter]) for store in self._kernel.space.stores}
        outputs = {name: exchanged.get(name, tensor) for name, tensor in written.items() if tensor is not None}
        call.run({name: tensor for name, tensor in exchanged.items() if name not in outputs}, outputs)


class AuthoredCall(InterpretedCall):
    """One call of an author's plan on one rank. arguments: the author's arguments by name."""

    def __init__(
        self,
        program: HostProgram,
        group: Group,
        workspace: HostWorkspace,
        kernel: AuthoredKernel,
        arguments: Mapping[str, Any],
    ) -> None:
        self._kernel, self._arguments = kernel, arguments
        super().__init__(program, group, workspace, group.timeout_s)

    def begin_step(self, step: PendingStep) -> IsDone | None:
        """Launch the author's kernel in a thread; start other steps as `InterpretedCall` does."""
        if not step.is_kernel or self.plan.realization.engine_of(step.queue) != AUTHOR_KERNEL:
            return super().begin_step(step)
        kernel, kernel_call = self._kernel, author_call(self._kernel, self._arguments, self.binding, step.queue)
        if kernel_call is None:
            return None
        programs = min(PROGRAMS, kernel_call.tiles) if kernel.is_persistent else kernel_call.tiles
        return self.start(lambda: kernel.function[(programs,)](**kernel_call.arguments))
