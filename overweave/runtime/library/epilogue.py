"""The epilogue where a library multiplied: torch's own operations on the product, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as functional

from overweave.ir.epilogue import NO_EPILOGUE, Activation, Epilogue, Norm
from overweave.ir.operators.forms import BIAS, GATE, NORM_WEIGHT, RESIDUAL, SCALE_W, Z, input_of, registered
from overweave.ir.problem import Problem
from overweave.ir.schedule import Collective, Compute, Copy, Operation, Range, Reduce
from overweave.memory.group import Group
from overweave.runtime.library.library import End, View, full_precision, run_operation, without_autocast
from overweave.runtime.library.scaled import multiply_scaled, scaled_matmul, scales_of_columns, scales_of_rows

Moved = tuple[Mapping[str, torch.Tensor], Group]

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda value: functional.gelu(value, approximate="tanh"),
}


def run_with_epilogue(operation: Operation, problem: Problem, view: View, moved: Moved) -> None:
    """Runs an operation by the library, and does to products and to sums what the problem's epilogue says; to those of
    a collective `end_collective` does it.

    moved: the caller's tensors, bias as `[n]` or `[1, n]`, and the group. Sums are rounded once; of products each step
    but scaling is rounded to the dtype of y, and a gate is one matmul more.
    """
    tensors, group = moved
    if problem.epilogue is NO_EPILOGUE:
        run_operation(operation, view, group)
        return
    epilogue, end = problem.of_products, _end_of(problem, tensors)
    if isinstance(operation, Compute):
        first, (lo, hi) = problem.columns_of(operation.b.buffer)[0], operation.b.cols
        tensors = columns_of(tensors, (first + lo, first + hi), problem.n)
    if epilogue.scaling and isinstance(operation, Compute):
        multiply_scaled(operation, view, tensors, end)
    else:
        run_operation(operation, view, group, end)
    if epilogue.bits and isinstance(operation, Compute):
        for part, out in enumerate(operation.out):
            if not out.is_empty:
                y = view(out)
                gate = _gate(operation, part, view, tensors) if epilogue.products > 1 else None
                apply_epilogue(y, slice(*out.rows), epilogue, tensors, gate)


def end_collective(operation: Operation, problem: Problem, view: View, tensors: Mapping[str, torch.Tensor]) -> None:
    """What the problem's epilogue does to the sums that a collective left, which are rounded; nothing for others."""
    if isinstance(operation, Collective) and operation.finishes:
        end = _end_of(problem, tensors)
        for out in operation.writes:
            if not out.is_empty:
                end(view(out), out)


def _end_of(problem: Problem, tensors: Mapping[str, torch.Tensor]) -> End:
    return lambda total, out: apply_epilogue(
        total, slice(*out.rows), problem.of_sums, columns_of(tensors, out.cols, problem.n)
    )


def columns_of(tensors: Mapping[str, torch.Tensor], columns: Range, width: int) -> Mapping[str, torch.Tensor]:
    """What an epilogue reads beside some columns of a result of `width`: those of whatever has as many, or a multiple.

    Scales of the weight and of the gate stand one behind the other in one tensor.
    """
    if columns == (0, width):
        return tensors
    cut = dict(tensors)
    for name, tensor in tensors.items():
        read = input_of(name)
        if read is not None and read.cols == "of_columns" and tensor.numel() > 1:
            cut[name] = tensor.reshape(1, -1, width)[..., slice(*columns)].reshape(1, -1)
        elif read is not None and read.cols == "n":
            cut[name] = tensor[..., slice(*columns)]
    return cut


def _gate(compute: Compute, part: int, view: View, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The gate's product of a part of `a`."""
    a, weight, y = view(compute.a[part]), tensors[GATE], view(compute.out[part])
    if SCALE_W in tensors:
        product = y.new_empty(y.shape)
        scales = scales_of_rows(compute, view, tensors)[part], scales_of_columns(tensors)[1]
        scaled_matmul(a, weight, scales, product)
        return product
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
    for each in epilogue.added:
        form = registered(each.name)
        beside = {read.name: tensors[read.name][rows if read.rows == "y" else slice(None)] for read in form.inputs}
        assert form.reference
        y.copy_(form.reference(y, form.beside(beside, each.numbers)))


# What happens to a sum where a library summed, or the emulation: the epilogue of a collective's, and the RMSNorm of
# whole rows, by torch's own operations.


def finish_sum(operation: Operation, problem: Problem, view: View, tensors: Mapping[str, torch.Tensor]) -> None:
    """What the problem's epilogue or norm does to rows of `y` that an operation has just stored as sums; nothing for
    others, nor for sums that were given their epilogue before they were rounded.

    `tensors` are the caller's, the weight as `[n]` or `[1, n]`.
    """
    end_collective(operation, problem, view, tensors)
    if problem.of_rows is None or not _sums(operation, problem):
        return
    for out in operation.writes:
        if out.buffer == "y" and not out.is_empty:
            apply_norm(view(out), slice(*out.rows), problem.of_rows, tensors)


def apply_norm(y: torch.Tensor, rows: slice, norm: Norm, tensors: Mapping[str, torch.Tensor]) -> None:
    """Rows `rows` of a sum, which `y` holds, to `z` and, normed, back to `y`. Each step rounds, as torch does."""
    z, weight = tensors[Z][rows], tensors[NORM_WEIGHT].view(-1)
    z.copy_(y + tensors[RESIDUAL][rows] if norm.residual else y)
    with without_autocast():
        y.copy_(functional.rms_norm(z, (z.shape[1],), weight, norm.eps))


def _sums(operation: Operation, problem: Problem) -> bool:
    """Whether an operation leaves whole sums behind, its own or others'; of a group of one, products are."""
    return isinstance(operation, Reduce | Copy | Collective) or (
        isinstance(operation, Compute) and problem.world_size == 1
    )
