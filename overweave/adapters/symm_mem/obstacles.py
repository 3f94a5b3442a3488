"""Reasons why overweave does not support a call of a fused operator. A function returns one, or empty."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from overweave.errors import GroupError
from overweave.ir.problem import LONGEST_LIST
from overweave.ops.call.groups import group_of
from overweave.ops.call.operands import DTYPES as NAMES
from overweave.ops.call.operands import FP8
from overweave.tuner.space.problem_words import FP8_STEP

DTYPES = (*NAMES,)
LAST_DIMENSION = "the last dimension, which holds columns, gathered or scattered"
MOVES_NOTHING = ("fake", "threaded", "undefined")  # backends that do not communicate between processes


def of_operands(a: torch.Tensor, bs: Sequence[torch.Tensor], dim: int, group: str) -> str:
    """Check shapes, memory layouts and the group."""
    if dim in (-1, a.dim() - 1):
        return LAST_DIMENSION
    if a.dim() < 2 or any(b.dim() != 2 or b.shape[0] != a.shape[-1] for b in bs) or not 0 <= dim < a.dim():
        return "operands that do not multiply"
    if not 1 <= len(bs) <= LONGEST_LIST:
        return f"{len(bs)} weights"
    if not all(b.numel() for b in bs):
        return "an empty weight"
    if any(b.dtype != a.dtype or b.device != a.device for b in bs):
        return "operands of several dtypes or devices"
    if not (all(b.is_contiguous() for b in bs) or all(b.t().is_contiguous() for b in bs)):
        return "weights that are not dense, or in two memory layouts"
    return _of_group(group)


def of_dtype(a: torch.Tensor) -> str:
    """Check the dtype of operands without scales."""
    return "" if a.dtype in DTYPES else f"operands in {a.dtype}"


def of_sum(extent: int, group: str, reduce_op: str, dtype: torch.dtype | None) -> str:
    """Check a sum over ranks. extent: of the scattered dimension. dtype: of the result."""
    if reduce_op not in ("sum", "avg"):
        return f"the reduction {reduce_op!r}"
    if reduce_op == "avg" and dtype == torch.float16:
        return "a mean in float16, whose sum may overflow"
    return "rows that ranks do not divide" if extent % group_of(group).world_size else ""


def of_scaled(
    bs: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype | None,
) -> str:
    """Check fp8 weights and their scales. A call that torch itself refuses is left to torch."""
    if any(b.dtype != FP8 for b in bs):
        return f"scaled operands in {bs[0].dtype}"
    if out_dtype not in DTYPES:
        return f"results in {out_dtype}"
    if any(factor is not None for factor in factors):
        return "a scale of the result"
    if any(extent % FP8_STEP for b in bs for extent in b.shape):
        return f"fp8 weights whose extents are no multiples of {FP8_STEP}"
    if not all(b.t().is_contiguous() for b in bs):
        return "fp8 weights that do not lie as [n, k]"
    of_rows, *of_columns = scales
    fit = all(scale.numel() in (1, b.shape[1]) for scale, b in zip(of_columns, bs, strict=True))
    fit = fit and (of_rows.numel() == 1 or of_rows.shape[-1] == 1)
    is_taken = fit and all(scale.dtype == torch.float32 for scale in scales)
    return "" if is_taken else "scales of blocks, or not in float32"


def _of_group(group: str) -> str:
    """Check the group and its backend."""
    try:
        found = group_of(group)
    except GroupError as error:
        return f"the group: {error.found}"
    backend = dist.get_backend(found.process_group)
    return f"a group whose backend is {backend}" if backend in MOVES_NOTHING else ""
