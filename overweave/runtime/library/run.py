"""Plans run by cuBLAS and NCCL (or torch and gloo) alone, on any device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from overweave.ir.blocks import stored_shape
from overweave.ir.launch.streams import queues_beside
from overweave.ir.library_call import is_permuted
from overweave.ir.plan import LIBRARY, Plan
from overweave.ir.schedule import LOCAL, Buffer, Operation
from overweave.memory.board.board import Board
from overweave.memory.group import Group, create_subgroups
from overweave.memory.outside_modes import empty_factory
from overweave.runtime.library.calls import (
    BoundLibraryCall,
    allocated_output,
    call_of,
    merge_parts,
    padded_rows,
    permuted_collective_call,
    shapes_of,
)

TensorsByName = Mapping[str, torch.Tensor]


def is_library_plan(plan: Plan) -> bool:
    """Return whether cuBLAS and NCCL alone run a plan, on one stream: without kernels of ours and without signals."""
    engines = {assignment.engine for assignment in plan.realization.engines}
    return engines <= {LIBRARY} and not plan.schedule.pads and not queues_beside(plan)


class LibraryRun:
    """A plan run by cuBLAS and NCCL alone: no signals, no workspace; local buffers come from torch's allocator.

    allocated_outputs: results that its matmuls allocate unless they are passed.
    """

    was_captured = False  # a graph that captured it keeps its own memory

    def __init__(self, plan: Plan, group: Group, example: TensorsByName) -> None:
        problem, shapes = plan.problem, shapes_of(example)
        buffers = {each.name: each for each in plan.schedule.buffers}
        local = [each for each in plan.schedule.buffers if each.home == LOCAL]
        allocated_shapes = {each.name: _allocated_shape(each, group.world_size) for each in local}
        shapes |= allocated_shapes
        create_subgroups(group, plan.schedule.of_rank(group.rank))
        rows, permuted = {each.name: each.rows for each in local}, list[Operation]()
        operations = list(plan.schedule.of_rank(group.rank))
        if problem.has_fixed_sizes:
            permuted = [each for each in operations if is_permuted(each, buffers)]
            operations = [each if each in permuted else merge_parts(each, shapes, rows) for each in operations]
        allocated = {allocated_output(each, problem, shapes) for each in operations if problem.has_fixed_sizes}
        self.allocated_outputs = frozenset(name for name in allocated if name in example)

        def how(operation: Operation) -> BoundLibraryCall:
            if operation in permuted:
                return permuted_collective_call(operation, buffers, group)
            return call_of(operation, plan, shapes, group)

        self._calls = [how(each) for each in operations]
        self._empty = empty_factory(example["w"].device)
        self._local = [
            (each.name, allocated_shapes[each.name], _dtype(each, problem.dtype))
            for each in local
            if each.name not in allocated
        ]
        self._board = Board.of(group)
        self._board.probes_rarely = True  # NCCL's watchdog ends a collective that waits for a dead peer

    def __call__(self, tensors: dict[str, torch.Tensor]) -> None:
        """Run the plan once, on the current stream. Add what it allocates to the tensors."""
        for name, shape, dtype in self._local:
            tensors[name] = self._empty(shape, dtype)
        for call in self._calls:
            call(tensors)
        if not self._board.is_watched:  # else the workspace does so at exit
            self._board.finish()  # collectives in flight have NCCL's watchdog


def _allocated_shape(buffer: Buffer, ranks: int) -> tuple[int, int]:
    """Return rows and columns of a local buffer's memory: rows padded for equal parts, unless blocks are permuted."""
    return stored_shape(buffer) if buffer.blocks else (padded_rows(buffer.rows, ranks), buffer.cols)


def _dtype(buffer: Buffer, otherwise: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, buffer.dtype or otherwise)
    return found
