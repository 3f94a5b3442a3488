"""The sum of several products as one: factors laid side by side along the axis that is summed over.

The Hopper kernel, and the library's matmul, take factors that lie in two parts, `x` and `x_rest`: of two products
nothing is copied. In a group of one the library adds product to product instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from overweave.errors import InputError
from overweave.ir.operators.record import Operator
from overweave.ir.operators.registry import names_with_form
from overweave.ir.plan import LIBRARY, TILE_KERNEL, W_REST, X_REST, Plan
from overweave.ir.problem import LONGEST_LIST
from overweave.ir.schedule import Compute
from overweave.ops.call.operands import FP8, check_operands, check_plain
from overweave.runtime.library.calls import is_plain_matmul
from overweave.runtime.library.library import full_precision, multiply_into

SideBySideWeights = list[torch.Tensor] | tuple[torch.Tensor, ...]  # of several products, as callers list them
HALF = 2  # bytes of an element that may lie in two parts: fp32 is not the Hopper kernel's, fp8 comes with scales
WHOLE_STEPS = 128  # columns of which the first part has a multiple: no tile kernel takes a longer step of k


def side_by_side(operator: Operator, xs: Sequence[torch.Tensor], ws: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """x and w of one product that equals the sum of `x @ w` over the pairs. Raises InputError.

    One matmul then sums in fp32 and rounds once. Weights that were split from one tensor are not copied. On a GPU the
    widest of the pairs stays where it lies: the others are `x_rest` and `w_rest`.
    """
    check_pairs(operator, xs, ws)
    return in_two_parts(xs, ws) if xs[0].is_cuda else _in_one_part(xs, ws)


def in_two_parts(xs: Sequence[torch.Tensor], ws: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The factors as the Hopper kernel takes them, which goes from one part to the other between two steps of k."""
    widest = max(range(len(xs)), key=lambda index: xs[index].shape[1])
    others = [index for index in range(len(xs)) if index != widest]
    first, rest = ([each[index] for index in others] for each in (xs, ws))
    is_alike = all(w.is_contiguous() for w in ws) or all(w.t().is_contiguous() for w in ws)
    if not others or not is_alike or xs[0].itemsize != HALF or xs[widest].shape[1] % WHOLE_STEPS:
        return _in_one_part(xs, ws)
    return {"x": xs[widest], "w": ws[widest], X_REST: _beside(first), W_REST: _below(rest)}


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a call with each factor in one part."""
    parts = dict(tensors)
    x_rest, w_rest = parts.pop(X_REST), parts.pop(W_REST)
    return parts | _in_one_part([parts["x"], x_rest], [parts["w"], w_rest])


def takes_parts(plan: Plan | None) -> bool:
    """Whether what computes the products of a plan, the Hopper kernel or the library, takes factors in two parts."""
    if plan is None or plan.realization.skinny is not None:
        return False
    matmul, products = plan.realization.matmul, [each for each in plan.schedule.operations if isinstance(each, Compute)]
    engines = {plan.realization.engine_of(each.queue) for each in products}
    if engines == {TILE_KERNEL}:
        return matmul is not None and matmul.kernel == "hopper"
    return engines == {LIBRARY} and all(is_plain_matmul(each, plan) for each in products)


def added_alone(operator: Operator, given: Mapping[str, Any]) -> torch.Tensor | None:
    """The sum of `x @ w` over the pairs of a call in a group of one, summed in fp32 and rounded once.

    None where more than that sum is asked for: an epilogue, a plan by name, or products of fp8. Raises InputError.
    """
    xs, ws = given["x"], given["w"]
    check_pairs(operator, xs, ws)
    first = xs[0]
    if first.dtype == FP8 or any(each is not None for name, each in given.items() if name not in ("x", "w")):
        return None
    total: torch.Tensor = first.new_empty((first.shape[0], ws[0].shape[1]), dtype=torch.float32)
    with full_precision(first.dtype):
        for index, (x, w) in enumerate(zip(xs, ws, strict=True)):
            multiply_into(total, x, w, adds=index > 0)
    return total.to(first.dtype)


def check_pairs(operator: Operator, xs: Sequence[Any], ws: Any) -> None:
    """Raises InputError for products that cannot be added."""
    name = operator.name
    if not operator.forms.several_products:
        only = names_with_form("several_products")
        raise InputError(f"{name}: x", f"got a list of {len(xs)}", f"Pass a tensor: only {only} add several")
    if not isinstance(ws, (list, tuple)) or len(ws) != len(xs) or not 1 <= len(xs) <= LONGEST_LIST:
        found = f"got {len(xs)} of x, {len(ws) if isinstance(ws, (list, tuple)) else 'one'} of w"
        raise InputError(f"{name}: x and w, lists of one length", found, f"Pass 1 to {LONGEST_LIST} pairs")
    for index, (x, w) in enumerate(zip(xs, ws, strict=True)):
        check_plain(f"{name}: x[{index}]", x)
        check_plain(f"{name}: w[{index}]", w)
        check_operands(name, x, w)
    if len({(x.shape[0], w.shape[1], x.dtype, x.device) for x, w in zip(xs, ws, strict=True)}) > 1:
        found = ", ".join(f"{list(x.shape)} @ {list(w.shape)}" for x, w in zip(xs, ws, strict=True))
        raise InputError(f"{name}: products of one shape and dtype", found, "Pass factors whose products can be added")


def _in_one_part(xs: Sequence[torch.Tensor], ws: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"x": _beside(xs), "w": _below(ws)}


def _beside(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    return xs[0] if len(xs) == 1 else torch.cat(list(xs), 1)


def _below(ws: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weights one below the other, in their memory layout if it is one."""
    if all(w.is_contiguous() for w in ws):
        return _joined(ws)
    return _joined([w.t() if w.t().is_contiguous() else w.t().contiguous() for w in ws], 1).t()


def _joined(ws: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Row-major matrices along a dimension of theirs; without a copy where they follow each other in memory."""
    if len(ws) == 1:
        return ws[0]
    first, rows, end = ws[0], 0, ws[0].data_ptr()
    for w in ws:
        if dim or w.data_ptr() != end or w.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(ws), dim)
        rows, end = rows + w.shape[0], end + w.numel() * w.element_size()
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))
