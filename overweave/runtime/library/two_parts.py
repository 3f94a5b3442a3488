"""Factors of the sum of several products, laid side by side along the axis that is summed over.

The Hopper kernel and cuBLAS take factors in two parts, `x` and `x_rest`: of two products nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from overweave.ir.plan import LIBRARY, TILE_KERNEL, W_REST, X_REST, Plan
from overweave.ir.schedule import Compute
from overweave.runtime.library.calls import is_plain_matmul
from overweave.runtime.library.library import full_precision, multiply_into

HALF = 2  # bytes of an element that may lie in two parts: fp32 is not the Hopper kernel's, fp8 comes with scales
WHOLE_STEPS = 128  # columns of which the first part has a multiple: no tile kernel takes a longer step of k


def lay_side_by_side(xs: Sequence[torch.Tensor], ws: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return x and w of one product that equals the sum of `x @ w` over the pairs, summed in fp32 and rounded once.

    Weights that were split from one tensor are not copied. On a GPU the widest of the pairs stays where it lies: the
    others are `x_rest` and `w_rest`.
    """
    return in_two_parts(xs, ws) if xs[0].is_cuda else _in_one_part(xs, ws)


def add_products(xs: Sequence[torch.Tensor], ws: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of `x @ w` over the pairs, summed in fp32 and rounded once; nothing is copied."""
    total = xs[0].new_empty((xs[0].shape[0], ws[0].shape[1]), dtype=torch.float32)
    with full_precision(xs[0].dtype):
        for index, (x, w) in enumerate(zip(xs, ws, strict=True)):
            multiply_into(total, x, w, adds=index > 0)
    return total.to(xs[0].dtype)


def in_two_parts(xs: Sequence[torch.Tensor], ws: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the factors as the Hopper kernel takes them: it goes from one part to the other between two steps of k."""
    widest = max(range(len(xs)), key=lambda index: xs[index].shape[1])
    others = [index for index in range(len(xs)) if index != widest]
    first, rest = ([each[index] for index in others] for each in (xs, ws))
    is_alike = all(w.is_contiguous() for w in ws) or all(w.t().is_contiguous() for w in ws)
    if not others or not is_alike or xs[0].itemsize != HALF or xs[widest].shape[1] % WHOLE_STEPS:
        return _in_one_part(xs, ws)
    return {"x": xs[widest], "w": ws[widest], X_REST: _beside(first), W_REST: _below(rest)}


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a call with each factor in one part."""
    parts = dict(tensors)
    x_rest, w_rest = parts.pop(X_REST), parts.pop(W_REST)
    return parts | _in_one_part([parts["x"], x_rest], [parts["w"], w_rest])


def takes_parts(plan: Plan | None) -> bool:
    """Return whether what computes a plan's products, the Hopper kernel or the library, takes factors in two parts."""
    if plan is None or plan.realization.skinny is not None:
        return False
    matmul, products = plan.realization.matmul, [each for each in plan.schedule.operations if isinstance(each, Compute)]
    engines = {plan.realization.engine_of(each.queue) for each in products}
    if engines == {TILE_KERNEL}:
        return matmul is not None and matmul.kernel == "hopper"
    return engines == {LIBRARY} and all(is_plain_matmul(each, plan) for each in products)


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
