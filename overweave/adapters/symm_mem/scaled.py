"""torch's two fused operators on scaled fp8 operands as calls of overweave's."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from overweave.adapters.rows import GradientResults, as_before, as_rows, averaged
from overweave.adapters.symm_mem import obstacles
from overweave.compat.torch_names import maybe_convert_scalar_types_to_dtypes as as_dtypes
from overweave.ops.all_gather_matmul import all_gather_matmul
from overweave.ops.call.groups import group_of
from overweave.ops.matmul_reduce_scatter import matmul_reduce_scatter

Optional = Sequence[torch.Tensor | None]


class ScaledGather(NamedTuple):
    """The arguments of `fused_all_gather_scaled_matmul`, one field each."""

    a: torch.Tensor
    bs: list[torch.Tensor]
    scale_a: torch.Tensor
    b_scales: list[torch.Tensor]
    dim: int
    group: str
    biases: Optional
    factors: Optional
    out_dtypes: list[torch.dtype | None]
    use_fast_accum: Sequence[bool]


class Scatter(NamedTuple):
    """The arguments of `fused_scaled_matmul_reduce_scatter`, one field each. shape: of the product."""

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
    factor: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False


def gather_obstacle(*arguments: object) -> str:
    """Return why overweave does not support a gather of fp8 operands; empty if it does."""
    call = ScaledGather(*arguments)  # type: ignore[arg-type]
    if len({*call.out_dtypes}) != 1:
        return "results in several dtypes"
    (out_dtype,), given = as_dtypes(call.out_dtypes[:1]), [bias for bias in call.biases if bias is not None]
    found = obstacles.of_operands(call.a, call.bs, call.dim, call.group)
    found = found or obstacles.of_scaled(call.bs, [call.scale_a, *call.b_scales], call.factors, out_dtype)
    if found or not given:
        return found
    fits = len(given) == len(call.bs) and all(bias.dtype == out_dtype and bias.dim() == 1 for bias in given)
    return "" if fits else "biases of some weights only, or in another dtype than the results"


def gather(*arguments: object) -> GradientResults:
    """Return the gathered fp8 rows, and the products with all weights."""
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
    given = [bias for bias in call.biases if bias is not None]
    products, gathered = all_gather_matmul(
        x,
        call.bs,
        call.group,
        bias=torch.cat(given) if given else None,
        scale_x=scale_x,
        scale_w=scale_w,
        out_dtype=as_dtypes(call.out_dtypes[:1])[0],
        return_gathered=True,
    )
    return [as_before(gathered, a, dim), *(as_before(y, a, dim) for y in products)]


def scatter_obstacle(*arguments: object, **options: object) -> str:
    """Return why overweave does not support a reduce-scatter of fp8 operands; empty if it does."""
    call = Scatter(*arguments, **options)  # type: ignore[arg-type]
    if call.shape is None or call.dim >= len(call.shape) - 1:
        return obstacles.LAST_DIMENSION
    if call.bias is not None:
        return "a bias that every rank adds to its partial"
    if prod(call.shape[:-1]) != prod(call.a.shape[:-1]):
        return "rows of the product that are not those of its operand"
    found = obstacles.of_operands(call.a, [call.b], 0, call.group)
    (out_dtype,) = as_dtypes([call.out_dtype])
    found = found or obstacles.of_scaled([call.b], [call.scale_a, call.scale_b], [call.factor], out_dtype)
    return found or obstacles.of_sum(call.shape[call.dim], call.group, call.reduce_op, out_dtype)


def scatter(*arguments: object, **options: object) -> GradientResults:
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
