"""Calls that all ranks agreed on once, as a group keeps them: by everything that decides how a call runs, and bounded.

A call that was forgotten is prepared again when it comes back; its peers, who may still know it, notice nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from overweave.ir.epilogue import Z
from overweave.ir.plan import Problem, numbered
from overweave.ir.shards import shard_rows
from overweave.memory.board import Board
from overweave.tuner.choice import Choice

SCATTERED = "matmul_reduce_scatter"
MOST_CALLS = 1024  # of one group; each keeps its tile tables on the device, some hundred KiB for a large problem
Tensors = dict[str, torch.Tensor]
Run = Callable[[Tensors], None]
Key = tuple[object, ...]
Output = tuple[str, tuple[int, int], torch.dtype]


class Bound(Protocol):
    """A plan bound to a GPU. was_captured: a graph of the caller's holds the addresses of what it owns."""

    was_captured: bool

    def __call__(self, tensors: Tensors, /) -> None: ...


class Prepared(NamedTuple):
    """A call that all ranks agreed on once: its problem, the choice made for it, and how it runs.

    bound: what the run keeps on a GPU; None if that is nothing. outputs: by name, what a call makes for its results.
    board: where calls are announced to the peers.
    """

    problem: Problem
    signature: bytes
    choice: Choice
    run: Run
    bound: Bound | None = None
    outputs: tuple[Output, ...] = ()
    board: Board | None = None

    def __call__(self, tensors: Tensors) -> None:
        """Runs the call on its inputs by name, to which its outputs are added."""
        like = tensors["x"]
        for name, shape, dtype in self.outputs:
            tensors[name] = like.new_empty(shape, dtype=dtype)
        self.run(tensors)


def outputs_of(problem: Problem, rank: int) -> tuple[Output, ...]:
    """What a call on a rank gives back."""
    lo, hi = (0, problem.m) if problem.operator != SCATTERED else shard_rows(problem.m, problem.world_size, rank)
    dtype: torch.dtype = getattr(torch, problem.result_dtype)
    made: list[Output] = [(numbered("y", index), (hi - lo, cols), dtype) for index, cols in enumerate(problem.widths)]
    if problem.returns_gathered:
        made.append(("gathered_out", (problem.m, problem.k), getattr(torch, problem.dtype)))
    if problem.norm is not None:
        made.append((Z, (problem.m, problem.n), dtype))
    return tuple(made)


class Calls:
    """The prepared calls of one group, those used last at the end; beyond the limit the first ones go."""

    def __init__(self) -> None:
        self._calls: OrderedDict[Key, Prepared] = OrderedDict()
        self._held: list[Bound] = []  # forgotten, but replayed by graphs of the caller's

    def get(self, key: Key) -> Prepared | None:
        prepared = self._calls.get(key)
        if prepared is not None:
            self._calls.move_to_end(key)
        return prepared

    def put(self, key: Key, prepared: Prepared) -> None:
        self._calls[key] = prepared
        if len(self._calls) > MOST_CALLS:
            self._drop(list(self._calls)[: MOST_CALLS // 4])

    def forget(self, operator: str) -> None:
        """The next call of each signature of an operator chooses anew, but for what callers asked for by name."""
        choices = [key for key, call in self._calls.items() if call.choice.source != "asked"]
        self._drop([key for key in choices if self._calls[key].problem.operator == operator])

    def _drop(self, keys: list[Key]) -> None:
        dropped = [bound for key in keys if (bound := self._calls.pop(key).bound) is not None]
        if dropped:
            torch.cuda.synchronize()  # none of them is under way when its memory goes
        self._held += [bound for bound in dropped if bound.was_captured]
