"""The epilogue where a library multiplied: torch's own operations on the product, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as functional

from overweave.ir.epilogue import BIAS, GATE, NO_EPILOGUE, RESIDUAL, SCALE_W, Activation, Epilogue
from overweave.ir.plan import Problem
from overweave.ir.schedule import Compute, Operation, Range
from overweave.memory.group import Group
from overweave.runtime.library import View, full_precision, run_operation
from overweave.runtime.scaled import multiply_scaled

Moved = tuple[Mapping[str, torch.Tensor], Group]

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda value: functional.gelu(value, approximate="tanh"),
}


def run_with_epilogue(operation: Operation, problem: Problem, view: View, moved: Moved) -> None:
    """Runs an operation by the library, and does to what a Compute stores in `y` what the problem's epilogue says.

    moved: the caller's tensors, bias as `[n]` or `[1, n]`, and the group. Each step but scaling is rounded to the dtype
    of y; a gate is one matmul more.
    """
    tensors, group = moved
    epilogue = problem.epilogue
    if epilogue is not NO_EPILOGUE and problem.columns and isinstance(operation, Compute):
        tensors = _of_weight(tensors, problem.columns_of(operation.b.buffer))
    if epilogue.scaling and isinstance(operation, Compute):
        multiply_scaled(operation, view, tensors)
    else:
        run_operation(operation, view, group)
    if epilogue is not NO_EPILOGUE and epilogue.bits and isinstance(operation, Compute):
        for a, out in zip(operation.a, operation.out, strict=True):
            if not out.is_empty:
                gate = _gate(view(a), tensors[GATE]) if problem.epilogue.gate else None
                apply_epilogue(view(out), slice(*out.rows), problem.epilogue, tensors, gate)


def _of_weight(tensors: Mapping[str, torch.Tensor], columns: Range) -> dict[str, torch.Tensor]:
    """What the epilogue of one of several weights reads: its own columns of what has one for each."""
    by_column = (name for name in (BIAS, SCALE_W) if name in tensors and tensors[name].numel() > 1)
    return {**tensors, **{name: tensors[name][..., slice(*columns)] for name in by_column}}


def _gate(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with full_precision(a.dtype):
        return torch.mm(a, weight)


def apply_epilogue(
    y: torch.Tensor,
    rows: slice,
    epilogue: Epilogue,
    tensors: Mapping[str, torch.Tensor],
    gate: torch.Tensor | None = None,
) -> None:
    """The epilogue of rows `rows` of a product, which `y` holds, in place. gate: the gate's product, or None."""
    if epilogue.bias:
        y += tensors[BIAS]
    if gate is not None:
        y *= ACTIVATIONS[epilogue.activation](gate) if epilogue.activation else gate
    elif epilogue.activation:
        y.copy_(ACTIVATIONS[epilogue.activation](y))
    if epilogue.residual:
        y += tensors[RESIDUAL][rows]
