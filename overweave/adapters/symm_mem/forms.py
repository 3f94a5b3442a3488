"""torch's fused operators in terms of overweave's: which calls are supported, and how they are computed.

A function `..._obstacle` returns why overweave does not support a call, empty if it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from overweave.adapters.rows import Results, as_before, as_rows, averaged
from overweave.compat.torch_names import maybe_convert_scalar_types_to_dtypes as as_dtypes
from overweave.errors import GroupError
from overweave.ir.problem import LONGEST_LIST
from overweave.ops.all_gather_matmul import all_gather_matmul
from overweave.ops.call.groups import group_of
from overweave.ops.call.operands import DTYPES as NAMES
from overweave.ops.call.operands import FP8
from overweave.ops.matmul_reduce_scatter import matmul_reduce_scatter
from overweave.tuner.space.shapes import FP8_STEP

DTYPES = (*NAMES,)
LAST_DIMENSION = "the last dimension, which holds columns, gathered or scattered"
NON_COMMUNICATING = ("fake", "threaded", "undefined")  # backends that do not communicate between processes


def _operand_obstacle(a: torch.Tensor, bs: Sequence[torch.Tensor], dim: int, group: str) -> str:
    """Return what is unsupported of shapes, memory layouts and the group."""
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
    return _group_obstacle(group)


def _dtype_obstacle(a: torch.Tensor) -> str:
    """Return what is unsupported of the dtype of operands without scales."""
    return "" if a.dtype in DTYPES else f"operands in {a.dtype}"


def _sum_obstacle(extent: int, group: str, reduce_op: str, dtype: torch.dtype | None) -> str:
    """Return what is unsupported of a sum over ranks. extent: of the scattered dimension. dtype: of the result."""
    if reduce_op not in ("sum", "avg"):
        return f"the reduction {reduce_op!r}"
    if reduce_op == "avg" and dtype == torch.float16:
        return "a mean in float16, whose sum may overflow"
    return "rows that ranks do not divide" if extent % group_of(group).world_size else ""


def _scales_obstacle(
    bs: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    result_scales: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype | None,
) -> str:
    """Return what is unsupported of fp8 weights and scales. Calls that torch itself refuses are left to torch."""
    if any(b.dtype != FP8 for b in bs):
        return f"scaled operands in {bs[0].dtype}"
    if out_dtype not in DTYPES:
        return f"results in {out_dtype}"
    if any(result_scale is not None for result_scale in result_scales):
        return "a scale of the result"
    if any(extent % FP8_STEP for b in bs for extent in b.shape):
        return f"fp8 weights whose extents are no multiples of {FP8_STEP}"
    if not all(b.t().is_contiguous() for b in bs):
        return "fp8 weights that do not lie as [n, k]"
    row_scale, *column_scales = scales
    fits = all(scale.numel() in (1, b.shape[1]) for scale, b in zip(column_scales, bs, strict=True))
    fits = fits and (row_scale.numel() == 1 or row_scale.shape[-1] == 1)
    is_supported = fits and all(scale.dtype == torch.float32 for scale in scales)
    return "" if is_supported else "scales of blocks, or not in float32"


def _group_obstacle(group: str) -> str:
    """Return what is unsupported of the group and its backend."""
    try:
        resolved = group_of(group)
    except GroupError as error:
        return f"the group: {error.found}"
    backend = dist.get_backend(resolved.process_group)
    return f"a group whose backend is {backend}" if backend in NON_COMMUNICATING else ""


OptionalTensors = Sequence[torch.Tensor | None]


class ScaledGather(NamedTuple):
    """The arguments of `fused_all_gather_scaled_matmul`, in torch's order."""

    a: torch.Tensor
    bs: list[torch.Tensor]
    scale_a: torch.Tensor
    b_scales: list[torch.Tensor]
    dim: int
    group: str
    biases: OptionalTensors
    result_scales: OptionalTensors
    out_dtypes: list[torch.dtype | None]
    use_fast_accum: Sequence[bool]


class Scatter(NamedTuple):
    """The arguments of `fused_scaled_matmul_reduce_scatter`, in torch's order. shape: of the product."""

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    reduce_op: str
    dim: int
    dim_of_a: int
    group: str
    shape: Sequence[int] | None
    bias: torch.Tensor | None = None
    result_scale: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False


def _scaled_gather_obstacle(*arguments: object) -> str:
    """Return why overweave does not support a gather of fp8 operands; empty if it does."""
    call = ScaledGather(*arguments)  # type: ignore[arg-type]
    if len({*call.out_dtypes}) != 1:
        return "results in several dtypes"
    (out_dtype,), biases = as_dtypes(call.out_dtypes[:1]), [bias for bias in call.biases if bias is not None]
    obstacle = _operand_obstacle(call.a, call.bs, call.dim, call.group)
    obstacle = obstacle or _scales_obstacle(call.bs, [call.scale_a, *call.b_scales], call.result_scales, out_dtype)
    if obstacle or not biases:
        return obstacle
    fits = len(biases) == len(call.bs) and all(bias.dtype == out_dtype and bias.dim() == 1 for bias in biases)
    return "" if fits else "biases of some weights only, or in another dtype than the results"


def _scaled_gather(*arguments: object) -> Results:
    """Return the gathered fp8 rows, and their products with all weights."""
    call = ScaledGather(*arguments)  # type: ignore[arg-type]
    a, x, dim = call.a, as_rows(call.a, call.dim), call.dim
    scale_a = call.scale_a
    if scale_a.numel() > 1 and scale_a.shape[:-1] != a.shape[:-1]:  # scales of all ranks' rows were passed
        ranks = group_of(call.group)
        scale_a = scale_a.chunk(ranks.world_size, dim)[ranks.rank]
    is_of_rows = scale_a.shape == (*a.shape[:-1], 1)
    if is_of_rows or len(call.bs) > 1:
        scale_x = (as_rows(scale_a, dim) if is_of_rows else scale_a.reshape(1, 1).expand(x.shape[0], 1)).contiguous()
        scale_w = _column_scales(call.b_scales, call.bs)
    else:
        scale_x, scale_w = scale_a.reshape(1, 1), call.b_scales[0].reshape(1, 1)
    biases = [bias for bias in call.biases if bias is not None]
    products, gathered = all_gather_matmul(
        x,
        call.bs,
        call.group,
        bias=torch.cat(biases) if biases else None,
        scale_x=scale_x,
        scale_w=scale_w,
        out_dtype=as_dtypes(call.out_dtypes[:1])[0],
        return_gathered=True,
    )
    return [as_before(gathered, a, dim), *(as_before(y, a, dim) for y in products)]


def _scaled_scatter_obstacle(*arguments: object, **options: object) -> str:
    """Return why overweave does not support a reduce-scatter of fp8 operands; empty if it does."""
    call = Scatter(*arguments, **options)  # type: ignore[arg-type]
    if call.shape is None or call.dim >= len(call.shape) - 1:
        return LAST_DIMENSION
    if call.bias is not None:
        return "a bias that every rank adds to its partial"
    if prod(call.shape[:-1]) != prod(call.a.shape[:-1]):
        return "rows of the product that are not those of its operand"
    obstacle = _operand_obstacle(call.a, [call.b], 0, call.group)
    (out_dtype,) = as_dtypes([call.out_dtype])
    obstacle = obstacle or _scales_obstacle([call.b], [call.scale_a, call.scale_b], [call.result_scale], out_dtype)
    return obstacle or _sum_obstacle(call.shape[call.dim], call.group, call.reduce_op, out_dtype)


def _scaled_scatter(*arguments: object, **options: object) -> Results:
    """Return this rank's rows of the sum of scaled products."""
    call = Scatter(*arguments, **options)  # type: ignore[arg-type]
    leading = (call.shape or ())[:-1]
    whole = call.a.reshape(*leading, call.a.shape[-1])
    x = as_rows(whole, call.dim)
    if call.scale_a.numel() > 1 or call.scale_b.numel() > 1:
        rows = call.scale_a.reshape(-1, 1).expand(x.shape[0], 1)
        scale_x, scale_w = as_rows(rows.reshape(*leading, 1), call.dim), _column_scales([call.scale_b], [call.b])
    else:
        scale_x, scale_w = call.scale_a.reshape(1, 1), call.scale_b.reshape(1, 1)
    (out_dtype,) = as_dtypes([call.out_dtype])
    y = matmul_reduce_scatter(x, call.b, call.group, scale_x=scale_x, scale_w=scale_w, out_dtype=out_dtype)
    return [as_before(averaged(y, call.reduce_op, call.group), whole, call.dim)]


def _column_scales(scales: Sequence[torch.Tensor], bs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one scale for each column of all weights, `[1, n]`."""
    widths = [b.shape[1] for b in bs]
    parts = [scale.reshape(1, -1).expand(1, width) for scale, width in zip(scales, widths, strict=True)]
    return torch.cat(parts, 1)


@dataclass(frozen=True)
class FusedOperator:
    """A fused operator of torch; both functions take the operator's arguments.

    obstacle: returns why overweave does not support a call, empty if it does. compute: returns the results in torch's
    order and shapes; their strides may differ.
    """

    name: str
    obstacle: Callable[..., str]
    compute: Callable[..., Results]

    @property
    def operator(self) -> Any:
        """torch's operator."""
        return getattr(torch.ops.symm_mem, self.name).default


def _gather_obstacle(a: torch.Tensor, bs: Sequence[torch.Tensor], dim: int, group: str, **_: object) -> str:
    return _operand_obstacle(a, bs, dim, group) or _dtype_obstacle(a)


def _gather(a: torch.Tensor, bs: list[torch.Tensor], dim: int, group: str, *, return_A: bool = True) -> Results:
    """Return the gathered input, None unless return_A, and all products."""
    if not return_A:
        return [None, *(as_before(y, a, dim) for y in all_gather_matmul(as_rows(a, dim), bs, group))]
    products, gathered = all_gather_matmul(as_rows(a, dim), bs, group, return_gathered=True)
    return [as_before(gathered, a, dim), *(as_before(y, a, dim) for y in products)]


def _scatter_obstacle(a: torch.Tensor, b: torch.Tensor, reduce_op: str, dim: int, group: str) -> str:
    obstacle = _operand_obstacle(a, [b], dim, group) or _dtype_obstacle(a)
    return obstacle or _sum_obstacle(a.shape[dim], group, reduce_op, a.dtype)


def _scatter(a: torch.Tensor, b: torch.Tensor, reduce_op: str, dim: int, group: str) -> Results:
    y = matmul_reduce_scatter(as_rows(a, dim), b, group)
    return [as_before(averaged(y, reduce_op, group), a, dim)]


FORMS = (
    FusedOperator("fused_all_gather_matmul", _gather_obstacle, _gather),
    FusedOperator("fused_matmul_reduce_scatter", _scatter_obstacle, _scatter),
    FusedOperator("fused_all_gather_scaled_matmul", _scaled_gather_obstacle, _scaled_gather),
    FusedOperator("fused_scaled_matmul_reduce_scatter", _scaled_scatter_obstacle, _scaled_scatter),
)
