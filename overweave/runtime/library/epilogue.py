"""The epilogue of cuBLAS products and of NCCL sums: torch's own operations, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as functional
from msgspec.structs import replace

from overweave.compat.torch_names import scaled_mm
from overweave.ir.epilogue import NO_EPILOGUE, Applied, Epilogue, Norm
from overweave.ir.operators.forms import GATE, NORM_WEIGHT, RESIDUAL, SCALE_W, SCALE_X, Z, input_of
from overweave.ir.problem import Problem
from overweave.ir.schedule import Collective, Compute, Copy, Operation, Range, Reduce, Region
from overweave.memory.group import Group
from overweave.runtime.library.library import (
    End,
    EndPair,
    View,
    add_product,
    full_precision,
    run_operation,
    without_autocast,
)

TensorsByName = Mapping[str, torch.Tensor]
Scales = tuple[torch.Tensor, torch.Tensor]
SCALES_BYTES = 16  # cuBLAS requires scales at multiples of so many bytes


def multiply_scaled(compute: Compute, view: View, tensors: TensorsByName, ends: EndPair) -> None:
    """`out = (a @ b) * scale_x * scale_w` for each part of `a`; scales per tensor, or of its rows and all columns.

    With addends, or added to what lies there, the scaled product stays fp32 until the sum is rounded. ends: as of
    `run_operation`.
    """
    for a, scale_x, out in zip(compute.a, row_scales(compute, view, tensors), compute.out, strict=True):
        if out.is_empty:
            continue
        scales, target = (scale_x, column_scales(tensors)[0]), view(out)
        if compute.addends or compute.accumulate:
            product = target.new_empty(target.shape, dtype=torch.float32)
            scaled_matmul(view(a), view(compute.b), scales, product)
            add_product(compute, product, view, (out, ends))
        else:
            scaled_matmul(view(a), view(compute.b), scales, target)


def row_scales(compute: Compute, view: View, tensors: TensorsByName) -> list[torch.Tensor]:
    """Return the row scales of each part of `a`, or the one scale of all."""
    return [view(region) for region in compute.scales] or [tensors[SCALE_X]] * len(compute.a)


def column_scales(tensors: TensorsByName) -> tuple[torch.Tensor, ...]:
    """Return the scales of the weight, and of the gate if there is one: both are in one tensor."""
    scale_w = tensors[SCALE_W]
    return scale_w.reshape(1, -1).chunk(2, dim=1) if GATE in tensors else (scale_w,)


def scaled_matmul(a: torch.Tensor, b: torch.Tensor, scales: Scales, out: torch.Tensor) -> None:
    """`out = (a @ b) * scales[0] * scales[1]`, summed in fp32 without torch's fast accumulation.

    a: `[m, k]`; b: `[k, n]`, stored as `[n, k]`; scales: fp32 `[1, 1]` both, or `[m, 1]` and `[1, n]`. Scaled by rows
    torch returns only bf16: in another dtype the scales are applied to its fp32 product.
    """
    if a.device.type == "cpu":
        with full_precision(torch.float32):
            out.copy_(torch.mm(a.float(), b.float()) * scales[0] * scales[1])
    elif out.dtype == torch.bfloat16 or scales[1].numel() == 1:
        scaled_mm(a, b, align_scales(scales[0]), align_scales(scales[1]), out_dtype=out.dtype, out=out)
    else:
        one = torch.ones(1, 1, dtype=torch.float32, device=a.device)
        out.copy_(scaled_mm(a, b, one, one, out_dtype=torch.float32) * scales[0] * scales[1])


def align_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales at an address that cuBLAS accepts: those of a gate, behind the weight's, may need a copy."""
    return scales.clone() if scales.data_ptr() % SCALES_BYTES else scales


IN_TORCH: dict[str, Callable[[Any, tuple[Any, ...]], Any]] = {
    "at most": lambda y, beside: y.clamp(max=beside[0]),
    "within": lambda y, beside: y.clamp(-beside[0], beside[0]),
    "silu": lambda y, _: functional.silu(y),
    "gelu": lambda y, _: functional.gelu(y),
    "gelu_tanh": lambda y, _: functional.gelu(y, approximate="tanh"),
}
Moved = tuple[Mapping[str, torch.Tensor], Group]


def run_with_epilogue(operation: Operation, problem: Problem, view: View, tensors_and_group: Moved) -> None:
    """Run an operation by cuBLAS or NCCL and apply the problem's epilogue to its products and sums.

    `finish_collective` applies it to a collective's sums. tensors_and_group: the caller's tensors, bias as `[n]` or
    `[1, n]`, and the group. Sums are rounded once; of products each step but scaling is rounded to the dtype of y.
    A gate is one matmul more.
    """
    tensors, group = tensors_and_group
    if problem.epilogue == NO_EPILOGUE:
        run_operation(operation, view, group)
        return
    epilogue, of_sum = problem.product_epilogue, _sum_epilogue(problem, tensors)
    if isinstance(operation, Compute):
        first, (lo, hi) = problem.columns_of(operation.b.buffer)[0], operation.b.cols
        tensors = slice_columns(tensors, (first + lo, first + hi), problem.n)
    ends: EndPair = _end(epilogue, tensors) if epilogue.added else None, of_sum
    if epilogue.scaling and isinstance(operation, Compute):
        multiply_scaled(operation, view, tensors, ends)
    else:
        run_operation(operation, view, group, ends)
    if epilogue.steps and isinstance(operation, Compute) and not (operation.addends or operation.accumulate):
        for part, out in enumerate(operation.out):
            if not out.is_empty:
                y = view(out)
                gate = _gate_product(operation, part, view, tensors) if epilogue.products > 1 else None
                apply_epilogue(y, slice(*out.rows), epilogue, tensors, gate)


def finish_collective(operation: Operation, problem: Problem, view: View, tensors: Mapping[str, torch.Tensor]) -> None:
    """Apply the problem's epilogue to the sums of a collective, which are rounded; do nothing for other operations."""
    if isinstance(operation, Collective) and operation.finishes:
        sum_epilogue = _sum_epilogue(problem, tensors)
        for out in operation.writes:
            if not out.is_empty:
                sum_epilogue(view(out), out)


def _end(epilogue: Epilogue, tensors: Mapping[str, torch.Tensor]) -> End:
    return lambda value, out: apply_epilogue(value, slice(*out.rows), epilogue, tensors)


def _sum_epilogue(problem: Problem, tensors: Mapping[str, torch.Tensor]) -> End:
    def end(total: torch.Tensor, out: Region) -> None:
        rows, beside = slice(*out.rows), slice_columns(tensors, out.cols, problem.n)
        if not problem.batch_invariant:
            apply_epilogue(total, rows, problem.sum_epilogue, beside)
            return
        # Torch's activations on a CPU round the elements behind the last whole vector otherwise than the others.
        for at, row in enumerate(total.split(1) if total.numel() else ()):
            apply_epilogue(row, slice(rows.start + at, rows.start + at + 1), problem.sum_epilogue, beside)

    return end


def slice_columns(tensors: Mapping[str, torch.Tensor], columns: Range, width: int) -> Mapping[str, torch.Tensor]:
    """Return the tensors with the epilogue's operands sliced to some columns of a result of `width` columns.

    The scales of the weight and then of the gate are in one tensor: both are sliced.
    """
    if columns == (0, width):
        return tensors
    sliced = dict(tensors)
    for name, tensor in tensors.items():
        read = input_of(name)
        if read is not None and read.cols == "of_columns" and tensor.numel() > 1:
            sliced[name] = tensor.reshape(1, -1, width)[..., slice(*columns)].reshape(1, -1)
        elif read is not None and read.cols == "n":
            sliced[name] = tensor[..., slice(*columns)]
    return sliced


def _gate_product(compute: Compute, part: int, view: View, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    a, weight, y = view(compute.a[part]), tensors[GATE], view(compute.out[part])
    if SCALE_W in tensors:
        product = y.new_empty(y.shape)
        scales = row_scales(compute, view, tensors)[part], column_scales(tensors)[1]
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
    """Apply the epilogue in place to `y`: rows `rows` of a product. gate: the gate's product, or None."""
    made = ended(y, rows, epilogue, tensors, gate)
    if made is not y:
        y.copy_(made)


def ended(
    y: torch.Tensor,
    rows: slice,
    epilogue: Epilogue,
    tensors: Mapping[str, Any],
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what an epilogue makes of rows `rows` of a scaled product or a sum, which may be y itself."""
    for applied, _, of_gate in epilogue.steps:
        if applied.name == epilogue.scaling:
            continue
        if of_gate:
            gate = in_torch(gate, rows, applied, tensors, 1)
        else:
            y = in_torch(y, rows, applied, tensors if gate is None else {**tensors, GATE: gate}).to(y.dtype)
    return y


def in_torch(y: Any, rows: slice, applied: Applied, tensors: Mapping[str, Any], product: int = 0) -> Any:
    """Return what a form makes of rows `rows` of a product or a sum. product: which of those that an input is of."""
    form, beside = applied.form, list[Any]()
    for read in form.inputs:
        tensor = tensors[read.name]
        of_products = tensor.view(-1, y.shape[-1])[product] if read.cols == "of_columns" else tensor
        beside.append(of_products[rows] if read.rows == "y" else of_products)
    reference = form.reference or IN_TORCH[form.name]
    return reference(y, (*beside, *applied.numbers))


# The epilogue of sums, and what is done to whole rows, of NCCL or of the emulation, by torch's own operations.


def finish_sum(operation: Operation, problem: Problem, view: View, tensors: Mapping[str, torch.Tensor]) -> None:
    """Apply the epilogue to a collective's sums, and the norm to rows of `y` that an operation has stored as sums.

    Do nothing for other operations. tensors: the caller's, the norm's weight as `[n]` or `[1, n]`.
    """
    finish_collective(operation, problem, view, tensors)
    if problem.of_rows is None or not _stores_sums(operation, problem):
        return
    for out in operation.writes:
        if out.buffer == "y" and not out.is_empty:
            finish_rows(view(out), slice(*out.rows), problem.of_rows, tensors)


def finish_rows(y: torch.Tensor, rows: slice, how: Norm | Applied, tensors: Mapping[str, torch.Tensor]) -> None:
    """Finish rows `rows` of a sum, which `y` holds: store what a form makes of them, or of RMSNorm them plus the
    residual in `z`, and their norm in `y`.

    Each step rounds, as torch does.
    """
    if isinstance(how, Applied):
        for name, made in zip(how.makes, in_torch(y, rows, how, tensors), strict=True):
            tensors[name][rows].copy_(made)
        return
    z, weight = tensors[Z][rows], tensors[NORM_WEIGHT].view(-1)
    z.copy_(y + tensors[RESIDUAL][rows] if how.residual else y)
    with without_autocast():
        y.copy_(functional.rms_norm(z, (z.shape[1],), weight, how.eps))


def _stores_sums(operation: Operation, problem: Problem) -> bool:
    """Return whether an operation stores complete sums, its own or copied ones.

    In a group of one a product is a sum.
    """
    return isinstance(operation, Reduce | Copy | Collective) or (
        isinstance(operation, Compute) and problem.world_size == 1
    )


def one_row_each(compute: Compute) -> Iterator[Compute]:
    """Yield the products of single rows: torch's matmul on a CPU has another order over k for other numbers of rows,
    where the tile kernel that it stands for has one."""
    columns = (compute.a, compute.out, compute.scales)
    for parts in zip_longest(*columns):
        for at in range(parts[0].shape[0]):
            a, out, scales = (None if part is None else _row(part, at) for part in parts)
            yield replace(compute, a=(a,), out=(out,), scales=() if scales is None else (scales,))


def _row(region: Region, at: int) -> Region:
    row = region.rows[0] + at
    return replace(region, rows=(row, row + 1))
