"""torch's own fused operators as candidates of ours: where the tuner measured them to be the quickest, they run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from overweave.ir.plan import Problem
from overweave.memory.board import Board
from overweave.memory.group import Group
from overweave.runtime.backends import load
from overweave.runtime.library import full_precision

Tensors = dict[str, torch.Tensor]


def bind_torch_fused(problem: Problem, group: Group) -> Callable[[Tensors], None]:
    """A run that puts torch's result in the place of the output: it allocates its own.

    Rows must divide by world_size (tuner/space.py says so). Raises, at the call, whatever torch raises.
    """
    load("gpu heap")  # the one module that loads torch's symmetric memory, and with it these operators
    multiply, board, workspace = _FUSED[problem.operator], Board.of(group), load("gpu workspace")

    def run(tensors: Tensors) -> None:
        with full_precision(tensors["x"].dtype):
            multiply(tensors, group.name)
        if workspace.opened(group, tensors["x"].device) is None:
            board.finish()

    return run


def _all_gather_matmul(tensors: Tensors, group: str) -> None:
    wants_gathered = "gathered_out" in tensors
    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(
        tensors["x"], [tensors["w"]], 0, group, return_A=wants_gathered
    )
    tensors["y"] = products[0]
    if wants_gathered:
        tensors["gathered_out"] = gathered


def _matmul_reduce_scatter(tensors: Tensors, group: str) -> None:
    tensors["y"] = torch.ops.symm_mem.fused_matmul_reduce_scatter(tensors["x"], tensors["w"], "sum", 0, group)


_FUSED: dict[str, Callable[[Tensors, str], None]] = {
    "all_gather_matmul": _all_gather_matmul,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
}
