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
from overweave.memory.board import Board
from overweave.tuner.choice import Choice

MOST_CALLS = 1024  # of one group; each keeps its tile tables on the device, some hundred KiB for a large problem
Tensors = dict[str, torch.Tensor]
Run = Callable[[Tensors], None]
Key = tuple[object, ...]
Output = tuple[str, tuple[int, int], torch.dtype]
Make = Callable[[tuple[int, int], torch.dtype], torch.Tensor]
# What the code calls that torch's compiler writes; of a CPU's torch, there is none.
_EMPTY_ON_GPU: Callable[..., torch.Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


class Bound(Protocol):
    """A plan bound to a GPU. was_captured: a graph of the caller's holds the addresses of what it owns."""

    was_captured: bool

    def __call__(self, tensors: Tensors, /) -> None: ...


def maker(device: torch.device) -> Make:
    """What makes a row-major matrix on a device, nothing in it: on a GPU the way that asks least of the host."""

    empty = _EMPTY_ON_GPU

    def by_torch(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def on_gpu(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        if empty is None or torch._C._cuda_getDevice() != device.index:
            return by_torch(shape, dtype)
        return empty(shape, (shape[1], 1), dtype)

    return on_gpu if device.type == "cuda" else by_torch


class Prepared(NamedTuple):
    """A call that all ranks agreed on once: its problem, the choice made for it, and how it runs.

    bound: what the run keeps on a GPU; None if that is nothing. outputs: by name, what a call makes for its results.
    board: where calls are announced to the peers. make: makes a matrix where x lies.
    """

    problem: Problem
    signature: bytes
    choice: Choice
    run: Run
    bound: Bound | None = None
    outputs: tuple[Output, ...] = ()
    board: Board | None = None
    make: Make = maker(torch.device("cpu"))

    def __call__(self, tensors: Tensors) -> None:
        """Runs the call on its inputs by name, to which its outputs are added.

        Peers count on it: they are told if it ends before it is launched."""
        try:
            for name, shape, dtype in self.outputs:
                tensors[name] = self.make(shape, dtype)
            self.run(tensors)
        except BaseException as error:
            if self.board is not None:
                self.board.give_up(error, self.problem.operator)
            raise


def outputs_of(problem: Problem, rank: int) -> tuple[Output, ...]:
    """What a call on a rank gives back."""
    rows = problem.result_rows(rank)
    dtype: torch.dtype = getattr(torch, problem.result_dtype)
    made: list[Output] = [(numbered("y", index), (rows, cols), dtype) for index, cols in enumerate(problem.widths)]
    if problem.returns_gathered:
        made.append(("gathered_out", (problem.m, problem.k), getattr(torch, problem.dtype)))
    if problem.norm is not None:
        made.append((Z, (problem.m, problem.n), dtype))
    return tuple(made)


def as_matrices(tensors: Tensors) -> Tensors:
    """The tensors of a call as plans describe them: vectors as one row, a number as `[1, 1]`.

    A call takes them as they were passed: kernels ask where they lie, and torch's operations broadcast.
    """
    return {name: tensor if tensor.dim() == 2 else tensor.reshape(1, -1) for name, tensor in tensors.items()}


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

    def close(self) -> bool:
        """Forgets all calls; whether nothing is left that graphs of the caller's replay."""
        self._drop(list(self._calls))
        return not self._held

    def _drop(self, keys: list[Key]) -> None:
        dropped = [bound for key in keys if (bound := self._calls.pop(key).bound) is not None]
        if dropped:
            torch.cuda.synchronize()  # none of them is under way when its memory goes
        self._held += [bound for bound in dropped if bound.was_captured]
