"""The epilogue where a library multiplied: torch's own operations on the product, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as functional

from overweave.ir.plan import BIAS, RESIDUAL, Activation, Epilogue, Problem
from overweave.ir.schedule import Compute, Operation, Region

View = Callable[[Region], torch.Tensor]

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda value: functional.gelu(value, approximate="tanh"),
}


def finish_product(operation: Operation, problem: Problem, view: View, tensors: Mapping[str, torch.Tensor]) -> None:
    """What the problem's epilogue does to the rows that a Compute has just stored in `y`; nothing for other operations.

    `tensors` are the caller's, bias as `[1, n]`. Each step is rounded to the dtype of `y`.
    """
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
