"""Plans that only a library runs, on any device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from overweave.ir.blocks import stored_shape
from overweave.ir.launch.streams import queues_beside
from overweave.ir.library_call import is_permuted
from overweave.ir.plan import LIBRARY, Plan
from overweave.ir.schedule import LOCAL, Buffer, Operation
from overweave.memory.board.board import Board
from overweave.memory.fast_empty import empty_factory
from overweave.memory.group import Group
from overweave.memory.subgroups import create_subgroups
from overweave.runtime.library.calls import BoundLibraryCall, allocated_output, counted_call, library_call
from overweave.runtime.library.permuted_collectives import permuted_collective_call
from overweave.runtime.library.views import merge_parts, padded_rows, shapes_of

TensorsByName = Mapping[str, torch.Tensor]


def is_library_plan(plan: Plan) -> bool:
    """Whether a library alone runs a plan, in one queue: no kernel of ours is launched, and nobody signals."""
    engines = {assignment.engine for assignment in plan.realization.engines}
    return engines <= {LIBRARY} and not plan.schedule.pads and not queues_beside(plan)


class LibraryRun:
    """A plan that only a library runs: no signals, no workspace; local buffers come from torch's allocator.

    makes: results that its matmuls make, unless it is given them.
    """

    was_captured = False  # a graph that captured it keeps its own memory

    def __init__(self, plan: Plan, group: Group, example: TensorsByName) -> None:
        problem, shapes = plan.problem, shapes_of(example)
        buffers = {each.name: each for each in plan.schedule.buffers}
        local = [each for each in plan.schedule.buffers if each.home == LOCAL]
        memory = {each.name: _allocated_shape(each, group.world_size) for each in local}
        shapes |= memory
        create_subgroups(group, plan.schedule.of_rank(group.rank))
        ends, permuted = {each.name: each.rows for each in local}, list[Operation]()
        operations = list(plan.schedule.of_rank(group.rank))
        if not problem.counted:
            permuted = [each for each in operations if is_permuted(each, buffers)]
            operations = [each if each in permuted else merge_parts(each, shapes, ends) for each in operations]
        made = {allocated_output(each, problem, shapes) for each in operations if not problem.counted}
        self.allocated_outputs = frozenset(name for name in made if name in example)

        def call_of(operation: Operation) -> BoundLibraryCall:
            if problem.counted:
                return counted_call(operation, plan, group)
            if operation in permuted:
                return permuted_collective_call(operation, buffers, group)
            return library_call(operation, problem, shapes, group)

        self._calls = [call_of(each) for each in operations]
        self._make = empty_factory(example["w"].device)
        self._local = [
            (each.name, memory[each.name], _dtype(each, problem.dtype)) for each in local if each.name not in made
        ]
        self._board = Board.of(group)
        self._board.probes_rarely = True  # a collective that waits for a dead peer ends by its library's watchdog

    def __call__(self, tensors: dict[str, torch.Tensor]) -> None:
        """Runs the plan once, on the current stream. What it makes is added to the tensors."""
        for name, shape, dtype in self._local:
            tensors[name] = self._make(shape, dtype)
        for call in self._calls:
            call(tensors)
        if not self._board.is_watched:  # no workspace, whose end would say so
            self._board.finish()  # what is under way is the library's, and its watchdog's


def _allocated_shape(buffer: Buffer, ranks: int) -> tuple[int, int]:
    """Rows and columns of a local buffer's memory, with room for equal parts of its rows where blocks are none."""
    return stored_shape(buffer) if buffer.blocks else (padded_rows(buffer.rows, ranks), buffer.cols)


def _dtype(buffer: Buffer, otherwise: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, buffer.dtype or otherwise)
    return found
