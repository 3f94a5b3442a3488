"""Calls that all ranks agreed on once, as a group keeps them: by everything that decides how a call runs, and bounded.

A call that was forgotten is prepared again when it comes back; its peers, who may still know it, notice nothing.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd import profiler

from overweave.compat.torch_names import is_profiler_enabled
from overweave.ir.plan import indexed_name
from overweave.ir.problem import Problem
from overweave.memory.board.board import Board
from overweave.memory.group import Group
from overweave.memory.outside_modes import Make, empty_factory
from overweave.tuner.model.choose import Choice

MOST_CALLS = 1024  # of one group; each keeps its tile tables on the device, some hundred KiB for a large problem
Tensors = dict[str, torch.Tensor]
PreparedRun = Callable[[Tensors], None]
CallKey = tuple[object, ...]
Output = tuple[str, tuple[int, int], torch.dtype]
_ON_CPU = empty_factory(torch.device("cpu"))
_CLOCK = count(1)


class BoundCall(Protocol):
    """A plan bound to a GPU. was_captured: a graph of the caller's holds the addresses of what it owns.
    allocated_outputs: results that it allocates itself, and adds to the tensors of a call."""

    was_captured: bool
    allocated_outputs: frozenset[str]

    def __call__(self, tensors: Tensors, /) -> None: ...


@dataclass(slots=True)
class AgreedCall:
    """A call that all ranks agreed on once, of an operator or of an author's kernel.

    signature: what they agreed on. run: runs it on what a call passes, by name.
    bound: what the run keeps on a GPU; None if that is nothing. outputs: by name, what is made for its results before
    it runs. board: where calls are announced to the peers. make: makes a matrix where x lies. last_use: which of all
    calls of this process was the last like it.
    """

    operation: str
    signature: bytes
    run: Callable[[dict[str, Any]], None]
    bound: BoundCall | None = None
    outputs: tuple[Output, ...] = ()
    board: Board | None = None
    make: Make = _ON_CPU
    last_use: int = 0

    def __call__(self, passed: dict[str, Any], words: bytes | None = None) -> None:
        """Runs the call on what was passed, by name, to which its outputs are added.

        words: of this call alone, announced to the peers with the signature; None: they have just agreed on it. Peers
        count on it: they are told if it ends before it is launched.
        """
        self.last_use = next(_CLOCK)
        if words is not None and self.board is not None:
            self.board.user_calls += 1
            self.board.post(self.signature + words)
        try:
            for name, shape, dtype in self.outputs:
                passed[name] = self.make(shape, dtype)
            if is_profiler_enabled():
                self._run_named(passed)
            else:
                self.run(passed)
        except BaseException as error:
            if self.board is not None:
                self.board.report_failure(error, self.operation)
            raise

    def _run_named(self, passed: dict[str, Any]) -> None:
        """Under a profiler, which tells the operator, its sizes and its plan."""
        with profiler.record_function(f"overweave.{self.operation} {self.signature.decode()}"):
            self.run(passed)


@dataclass(slots=True)
class Prepared(AgreedCall):
    """A call of an operator, with its problem and the choice made for it."""

    problem: Problem = field(kw_only=True)
    choice: Choice = field(kw_only=True)


def outputs_of(problem: Problem, rank: int) -> tuple[Output, ...]:
    """What a call on a rank gives back."""
    rows = problem.result_rows(rank)
    dtype: torch.dtype = getattr(torch, problem.result_dtype)
    made: list[Output] = [(indexed_name("y", index), (rows, cols), dtype) for index, cols in enumerate(problem.widths)]
    if problem.returns_gathered:
        made.append(("gathered_out", (problem.m, problem.k), getattr(torch, problem.dtype)))
    beside = ((name, problem.operand(name, rank)) for name in problem.also_made)
    return (*made, *((name, (rows, cols), getattr(torch, kept)) for name, (rows, cols, kept) in beside))


class Calls(dict[CallKey, AgreedCall]):
    """The prepared calls of one group; beyond the limit those go that ran longest ago."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[BoundCall] = []  # forgotten, but replayed by graphs of the caller's

    def put(self, key: CallKey, call: AgreedCall) -> None:
        self[key] = call
        call.last_use = next(_CLOCK)
        if len(self) > MOST_CALLS:
            by_use = sorted(self, key=lambda key: self[key].last_use)
            self._drop(by_use[: MOST_CALLS // 4])

    @property
    def of_operators(self) -> dict[CallKey, Prepared]:
        return {key: call for key, call in self.items() if isinstance(call, Prepared)}

    def latest(self) -> Prepared:
        """The one of an operator that ran last."""
        return max(self.of_operators.values(), key=lambda call: call.last_use)

    def forget(self, operator: str) -> None:
        """The next call of each signature of an operator chooses anew, but for what callers asked for by name."""
        calls = self.of_operators.items()
        self._drop([key for key, call in calls if call.operation == operator and call.choice.source != "asked"])

    def close(self) -> bool:
        """Forgets all calls; whether nothing is left that graphs of the caller's replay."""
        self._drop(list(self))
        return not self._held

    def _drop(self, keys: list[CallKey]) -> None:
        dropped = [bound for key in keys if (bound := self.pop(key).bound) is not None]
        if dropped:
            torch.cuda.synchronize()  # none of them is under way when its memory goes
        self._held += [bound for bound in dropped if bound.was_captured]


CALLS: dict[dist.ProcessGroup, Calls] = {}
atexit.register(CALLS.clear)  # a process group must not outlive the interpreter


def calls_of(group: Group) -> Calls:
    """The prepared calls of a group."""
    calls = CALLS.get(group.process_group)
    if calls is None:
        calls = CALLS[group.process_group] = Calls()
    return calls
