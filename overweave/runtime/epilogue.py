"""The epilogue where a library multiplied: torch's own operations on the product, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as functional

from overweave.ir.plan import BIAS, RESIDUAL, Activation, Epilogue, Problem
from overweave.ir.schedule import Compute, Operation
from overweave.memory.group import Group
from overweave.runtime.library import View, run_operation
from overweave.runtime.scaled import multiply_scaled

Moved = tuple[Mapping[str, torch.Tensor], Group]

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda value: functional.gelu(value, approximate="tanh"),
}


def run_with_epilogue(operation: Operation, problem: Problem, view: View, moved: Moved) -> None:
    """Runs an operation by the library, and does to what a Compute stores in `y` what the problem's epilogue says.

    moved: the caller's tensors, bias as `[1, n]`, and the group. Each step but scaling is rounded to the dtype of y.
    """
    tensors, group = moved
    if problem.epilogue.scaling and isinstance(operation, Compute):
        multiply_scaled(operation, view, tensors)
    else:
        run_operation(operation, view, group)
    if problem.epilogue.bits and isinstance(operation, Compute):
        for out in operation.out:
            if not out.is_empty:
                apply_epilogue(view(out), slice(*out.rows), problem.epilogue, tensors)


def apply_epilogue(y: torch.Tensor, rows: slice, epilogue: Epilogue, tensors: Mapping[str, torch.Tensor]) -> None:
    """The epilogue of rows `rows` of a product, which `y` holds, in place."""
    if epilogue.bias:
        y += tensors[BIAS]
    if epilogue.activation:
        y.copy_(ACTIVATIONS[epilogue.activation](y))
    if epilogue.residual:
        y += tensors[RESIDUAL][rows]
