"""fp8 operands and their scales, as torch._scaled_mm takes them: what may be passed, and the dtype that comes back."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from overweave.errors import InputError
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import SCALE_W, SCALE_X, Scaling
from overweave.ir.problem import Problem
from overweave.ops.call.arguments import DTYPES
from overweave.schedules.catalog.catalog import check_problem
from overweave.tuner.space.problem_words import FP8_STEP, check_sizes, compared, unaligned

FP8 = torch.float8_e4m3fn
TAKEN = (*DTYPES, FP8)  # by the operators


class Scales(NamedTuple):
    """scale_x, scale_w: as the caller passed them. out_dtype: of the result; None: bf16 for fp8, else that of x."""

    scale_x: torch.Tensor | None = None
    scale_w: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    def result_dtype(self, x: torch.Tensor) -> torch.dtype:
        """What the result of an operator is made in."""
        if self.out_dtype is not None:
            return self.out_dtype
        return torch.bfloat16 if x.dtype == FP8 else x.dtype


def name_of(dtype: torch.dtype) -> Dtype:
    """As plans call it."""
    return FLOAT8 if dtype == FP8 else DTYPES[dtype]  # type: ignore[return-value]


def dtype_of(name: Dtype) -> torch.dtype:
    """What plans call so."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def problem_of(operator: str, extents: tuple[int, int, int], world_size: int, dtype: torch.dtype) -> Problem:
    """The problem `[m, k] @ [k, n]` that is tuned and explained; of fp8 scaled by rows, into bf16. Or InputError."""
    if dtype not in TAKEN:
        raise InputError(f"{operator} on [m, k] @ [k, n]", f"dtype {dtype}", f"Use one of {', '.join(map(str, TAKEN))}")
    m, n, k = extents
    problem = Problem(operator=operator, m=m, n=n, k=k, world_size=world_size, dtype=name_of(dtype))
    check_problem(f"{operator} on [{m}, {k}] @ [{k}, {n}]", problem)
    check_sizes(problem)
    return compared(problem)


def checked_scaling(
    operator: str, scales: Scales, x: torch.Tensor, *weights: torch.Tensor, has_gate: bool = False
) -> Scaling | None:
    """How the products by all weights are scaled; None if they are not. Raises InputError.

    has_gate: whether a gate of the weight's shape has scales of its own, behind the weight's.
    """
    given = {SCALE_X: scales.scale_x, SCALE_W: scales.scale_w}
    if x.dtype != FP8:
        _refuse_scales(operator, scales, x)
        return None
    for w in weights:
        _check_layout(operator, w)
    if scales.out_dtype is not None and scales.out_dtype not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise InputError(f"{operator}: out_dtype", f"got {str(scales.out_dtype)[:40]}", f"Use one of {known}, or None")
    for name, tensor in given.items():
        _check_scale(operator, name, tensor, x)
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items() if tensor is not None}
    products = 2 if has_gate else 1
    if prod(shapes[SCALE_X]) == 1 and prod(shapes[SCALE_W]) == products and shapes[SCALE_W][-1:] in ((), (products,)):
        return "tensor"
    wanted = {SCALE_X: (x.shape[0], 1), SCALE_W: (1, products * sum(w.shape[1] for w in weights))}
    if shapes != wanted:
        one = f"one element of {SCALE_X} and two of {SCALE_W}, w's and the gate's" if has_gate else "one element each"
        columns = "columns of w and, behind them, of the gate" if has_gate else "columns"
        cure = f"Pass {one}, or {wanted[SCALE_X]} for the own rows and {wanted[SCALE_W]} for the {columns}"
        raise InputError(f"{operator}: {SCALE_X} and {SCALE_W}", f"got {shapes[SCALE_X]} and {shapes[SCALE_W]}", cure)
    return "rows"


def _check_scale(operator: str, name: str, scale: torch.Tensor | None, x: torch.Tensor) -> None:
    if not isinstance(scale, torch.Tensor):
        cure = f"Pass extras=ow.Extras({SCALE_X}=, {SCALE_W}=), fp32 tensors; of ones if nothing was scaled"
        raise InputError(f"{operator}: {name} of fp8 operands", f"got {type(scale).__name__}", cure)
    if (scale.dtype, scale.device) != (torch.float32, x.device) or not scale.is_contiguous():
        found = f"got {scale.dtype} on {scale.device}, strides {scale.stride()}"
        raise InputError(f"{operator}: {name}, fp32, contiguous, beside x", found, f"Pass {name}.float().contiguous()")
    if torch.is_grad_enabled() and scale.requires_grad:
        raise InputError(f"{operator}: tensors without gradient", f"{name} requires_grad", "Call it under no_grad")


def _refuse_scales(operator: str, scales: Scales, x: torch.Tensor) -> None:
    if scales.scale_x is not None or scales.scale_w is not None:
        cure = f"Cast x and w to {FP8}, or leave the scales out"
        raise InputError(f"{operator}: scales", f"x is {x.dtype}", cure)
    if scales.out_dtype not in (None, x.dtype):
        raise InputError(f"{operator}: out_dtype {scales.out_dtype}", f"x is {x.dtype}", "Only fp8 has another: cast y")


def _check_layout(operator: str, w: torch.Tensor) -> None:
    k, n = w.shape
    if k % FP8_STEP or n % FP8_STEP:
        raise unaligned(operator, n, k)
    if not w.t().is_contiguous():
        found, cure = f"w {list(w.shape)} has strides {w.stride()}", "Store the weight as [n, k] and pass weight.t()"
        raise InputError(f"{operator}: fp8 w with k contiguous", found, cure)
