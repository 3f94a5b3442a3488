"""Plans that only a library runs, on any device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from overweave.ir.plan import Plan
from overweave.ir.schedule import LOCAL, Buffer
from overweave.memory.board.board import Board
from overweave.memory.fast_empty import maker
from overweave.memory.group import Group
from overweave.memory.subgroups import make_parts
from overweave.runtime.library.calls import counted_call, library_call, made_by
from overweave.runtime.library.views import joined, shapes_of, with_room

Tensors = Mapping[str, torch.Tensor]


class LibraryRun:
    """A plan that only a library runs: no signals, no workspace; local buffers come from torch's allocator.

    makes: results that its matmuls make, unless it is given them.
    """

    was_captured = False  # a graph that captured it keeps its own memory

    def __init__(self, plan: Plan, group: Group, example: Tensors) -> None:
        problem, shapes = plan.problem, shapes_of(example)
        local = [each for each in plan.schedule.buffers if each.home == LOCAL]
        shapes |= {each.name: (with_room(each.rows, group.world_size), each.cols) for each in local}
        make_parts(group, plan.schedule.of_rank(group.rank))
        ends, own = {each.name: each.rows for each in local}, plan.schedule.of_rank(group.rank)
        operations = [each if problem.counted else joined(each, shapes, ends) for each in own]
        made = {made_by(each, problem, shapes) for each in operations if not problem.counted}
        self.makes = frozenset(name for name in made if name in example)
        self._calls = [
            counted_call(each, plan, group) if problem.counted else library_call(each, problem, shapes, group)
            for each in operations
        ]
        self._make = maker(example["w"].device)
        self._local = [
            (each.name, shapes[each.name], _dtype(each, problem.dtype)) for each in local if each.name not in made
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


def _dtype(buffer: Buffer, otherwise: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, buffer.dtype or otherwise)
    return found
