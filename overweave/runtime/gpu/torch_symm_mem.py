"""Torch's own operators on symmetric memory, bound in place of a plan.

Its fused ones allocate their workspace. Its all-reduces sum a tensor in symmetric memory, into which the matmul writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.problem import Problem
from overweave.memory.board.board import Board
from overweave.memory.group import Group
from overweave.runtime.backends import load
from overweave.runtime.gpu.replays import Replays
from overweave.runtime.library.library import full_precision, use_torch_kernels

Tensors = dict[str, torch.Tensor]
Run = Callable[[Tensors], None]


def bind_by_torch(collective: str, problem: Problem, group: Group, example: Tensors) -> tuple[Run, AllReduceRun | None]:
    """Return (a run of one of torch's operators, the memory that it keeps). Collective. Raises what torch raises.

    collective: the all-reduce of `torch.ops.symm_mem` that sums cuBLAS products; empty: torch's fused operator.
    example: tensors as of a call.
    """
    load("gpu heap")  # imports torch's symmetric memory, which registers these operators
    bound = AllReduceRun(collective, problem, group, example["x"].device) if collective else None
    multiply: Run = bound or (lambda tensors: _fused(problem, tensors, group.name))
    if bound is None:
        multiply(dict(example))  # torch's fused operators make their workspace when they first run, and keep it
    board = Board.of(group)

    def run(tensors: Tensors) -> None:
        multiply(tensors)
        if not board.is_watched:
            board.finish()  # otherwise the workspace does, when it ends

    return run, bound


class AllReduceRun:
    """The matmul into symmetric memory, and torch's all-reduce of that into `y`: one graph once tensors come back.

    Its kernels end when every rank has read what it needs, so the next call on the stream may write there again. They
    have 24 blocks at most, and leave SMs to what other libraries run: see PackedPlan of runtime/gpu/bound.py.
    """

    was_captured = False
    allocated_outputs: frozenset[str] = frozenset()

    def __init__(self, collective: str, problem: Problem, group: Group, device: torch.device) -> None:
        self._name, self._sum = group.name, getattr(torch.ops.symm_mem, f"{collective}_out")
        self._scratch = load("gpu scratch").of(group, device)
        self._scratch.reserve(problem.m * problem.n * ITEMSIZE_BYTES[problem.result_dtype])
        self._shape, self._dtype = (problem.m, problem.n), getattr(torch, problem.result_dtype)
        self._captured_heaps: list[object] = []  # heaps whose addresses the caller's graphs hold
        self._heap: Any = None  # that of the last call: its partial and its graphs use it
        self._may_replay = True

    def __call__(self, tensors: Tensors, /) -> None:
        scratch = self._scratch
        if scratch.heap is not self._heap:
            self._move_to(scratch.heap)
        if torch.cuda.is_current_stream_capturing():
            if not self._captured_heaps or self._captured_heaps[-1] is not self._heap:
                self._captured_heaps.append(self._heap)
            self.was_captured = True
            self._enqueue(tensors)
            return
        scratch.enter(scratch.current_stream())
        addresses = tuple([tensor.data_ptr() for tensor in tensors.values()])
        if not (self._may_replay and self._replays.launch(addresses, scratch.captures, self._enqueue, tensors)):
            self._enqueue(tensors)

    def _move_to(self, heap: Any) -> None:
        """Use another heap, without the old one's graphs. None is running: heaps are allocated on idle GPUs."""
        self._heap, self._replays = heap, Replays()
        self._partial = heap.view(0, self._shape, self._dtype)

    def _enqueue(self, tensors: Tensors, stream: object = None) -> None:
        """Enqueue matmul and all-reduce on the current stream."""
        x = tensors["x"]
        with full_precision(x.dtype):
            torch.mm(x, tensors["w"], out=self._partial)
        self._sum(self._partial, "sum", self._name, tensors["y"])


def _fused(problem: Problem, tensors: Tensors, group: str) -> None:
    """Run torch's fused operator of the problem."""
    compute = _fused_gather if problem.record.gathers else _fused_scatter
    with full_precision(tensors["x"].dtype), use_torch_kernels():
        compute(tensors, group)


def _fused_gather(tensors: Tensors, group: str) -> None:
    wants_gathered = "gathered_out" in tensors
    names = [name for name in tensors if name.split(".")[0] == "w"]
    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(
        tensors["x"], [tensors[name] for name in names], 0, group, return_A=wants_gathered
    )
    tensors |= {name.replace("w", "y"): product for name, product in zip(names, products, strict=True)}
    if wants_gathered:
        tensors["gathered_out"] = gathered


def _fused_scatter(tensors: Tensors, group: str) -> None:
    tensors["y"] = torch.ops.symm_mem.fused_matmul_reduce_scatter(tensors["x"], tensors["w"], "sum", 0, group)
