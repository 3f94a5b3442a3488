"""Author's kernels on CPU ranks: the fused kernel interpreted, with real signals between processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from overweave.compiler.emit.emit import PLACES
from overweave.ir.plan import AUTHOR_KERNEL, Plan
from overweave.memory.group import Group
from overweave.memory.host.workspace import HostWorkspace
from overweave.memory.layout import lay_out
from overweave.memory.lower import slice_targets
from overweave.runtime.authored import (
    AuthoredKernel,
    Place,
    place_rows,
    protocol_arguments,
    slice_arguments,
    tensor_of,
    tiles_and_parts,
)
from overweave.runtime.host.agenda import Step
from overweave.runtime.host.beside import IsDone
from overweave.runtime.host.emulate import Tensors
from overweave.runtime.interpreted.interpreted import PROGRAMS, InterpretedCall


class AuthoredRun:
    """A plan and its kernel, bound to this rank's group. Calls follow each other in the same sequence on all ranks."""

    def __init__(self, plan: Plan, group: Group, kernel: AuthoredKernel) -> None:
        self._plan, self._group, self._kernel = plan, group, kernel
        self._layout = lay_out(plan.schedule, plan.realization.dtype)

    @classmethod
    def bind(cls, plan: Plan, group: Group, kernel: AuthoredKernel, given: Mapping[str, Any]) -> AuthoredRun:
        """Ready to run; `given`: arguments as it will be called with."""
        return cls(plan, group, kernel)

    def __call__(self, given: Mapping[str, Any], inputs: Tensors, outputs: Tensors) -> None:
        """inputs, outputs: what is exchanged, by tensor. Raises PeerError, and then all that is written is NaN."""
        workspace = HostWorkspace.of(self._group)
        call = AuthoredCall(self._plan, self._group, workspace, self._kernel, given)
        stored = {store.tensor: tensor_of(given[store.parameter]) for store in self._kernel.space.stores}
        written = {name: tensor for name, tensor in stored.items() if tensor is not None}
        call.run(self._layout, inputs, written | dict(outputs))


class AuthoredCall(InterpretedCall):
    """One call of an author's plan on one rank. given: the author's arguments by name."""

    def __init__(
        self, plan: Plan, group: Group, workspace: HostWorkspace, kernel: AuthoredKernel, given: Mapping[str, Any]
    ) -> None:
        self._kernel, self._given = kernel, given
        super().__init__(plan, group, workspace, group.timeout_s)

    def begin_step(self, step: Step) -> IsDone | None:
        """Launches the author's kernel in a thread; everything else as for our own kernels."""
        if not step.is_kernel or self.plan.realization.engine_of(step.queue) != AUTHOR_KERNEL:
            return super().begin_step(step)
        kernel, rows = self._kernel, self.plan.tile_order(self.group.rank, step.queue).rows
        tiles, parts = tiles_and_parts(rows)
        binding, rank = self.binding, self.group.rank
        arrays = [torch.tensor(rows, dtype=torch.int32), self.words.claims, *binding.protocol[:3]]
        arguments = kernel.arguments(self._given, self._matrix)
        arguments |= protocol_arguments(arrays, tiles, parts, self.group.world_size)
        targets = binding.table(slice_targets(binding.addresses, rank, step.queue))
        arguments |= slice_arguments(targets, self.plan, rank, step.queue)
        if kernel.away is not None:
            arguments |= self._places(step)
        programs = min(PROGRAMS, tiles) if kernel.is_persistent else tiles
        return self.start(lambda: kernel.function[(programs,)](**arguments))

    def _matrix(self, buffer: str) -> torch.Tensor:
        return self.tensors[buffer] if buffer in self.tensors else self.instance(buffer, self.group.rank)

    def _places(self, step: Step) -> dict[str, torch.Tensor]:
        """Where tiles store at peers."""
        assert self._kernel.away is not None
        own = self._matrix(self._kernel.places[self._kernel.away.parameter][1])

        def distance(place: Place) -> int:
            buffer, rank, rows = place
            there = self._matrix(buffer) if rank == self.group.rank else self.instance(buffer, rank)
            return (there.data_ptr() - own.data_ptr()) // own.element_size() + rows * there.shape[1]

        bases, ranks = self.slot.heap.addresses, self.group.world_size
        rows = place_rows(step.operations, self._kernel, ranks, distance, lambda rank: bases[rank])
        return {PLACES: self.binding.table(rows)}
