"""The grouped matmul: rows that lie expert by expert, each group times its expert's weight."""

from __future__ import annotations

from typing import Any, cast

import torch

from overweave.moe import gradients
from overweave.moe.operands import check, check_tensors
from overweave.ops.dispatch.torch_ops import TorchOp, define
from overweave.runtime.backends import load
from overweave.runtime.library import grouped as reference
from overweave.runtime.library.grouped import Grouped


def grouped_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    activation: str | None = None,
    rows: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    gating: tuple[float, float, float] | None = None,
) -> torch.Tensor:
    """Multiply each group of rows by its expert's weight, as `torch.nn.functional.grouped_mm(x, w, offs=offs)`.

    x: `[rows, k]`, sorted by expert; bf16, fp16, fp32, or fp8 (e4m3) with scales. w: `[experts, k, n]`, k or n
    contiguous. offs: int32 `[experts]` on the device of x: where each expert's rows end, never descending. The result
    is `[rows, n]`; rows from `offs[-1]` on are not computed, and hold anything. Plain torch, of expert e and its
    rows `[lo, hi)`:

        value = x[lo:hi].float() @ w[e].float()                                      # x[rows[lo:hi]] with `rows`
        value *= scale_x[lo:hi, None] * scale_w[e]                                   # fp8
        value = act(value + bias[e])
        out[lo:hi] = (value * row_weights[lo:hi, None]).to(out_dtype)                # out[into[lo:hi]] with `into`

    gate: another weight of w's shape and layout, whose product is scaled as the first one is; then, with gating:

        value, gated = value + bias[e, 0], x[lo:hi].float() @ gate[e].float() + bias[e, 1]
        value, gated = value.clamp(-limit, limit) + shift, gated.clamp(max=limit)
        value = value * act(slope * gated) / slope

    activation: `silu`, `gelu`, `gelu_tanh` or None. gating: (limit, slope, shift); None: (inf, 1, 0). Only silu has a
    slope. bias: `[experts, n]`, with a gate `[experts, 2, n]`, the gate's last.
    rows: int32 `[pairs]`, which row of x each row of the product is made of; the result has `pairs` rows.
    into: int32 `[pairs]`, where each row of the product is stored: no two at one place. An index out of range is never
    followed: such a row of x is NaN, such a row of the result is not stored.
    row_weights: fp32 `[pairs]`, by which each row of the result is multiplied last.
    scale_x: fp32 `[rows of x]`, scale_w: fp32 `[experts, n]` (with a gate `[experts, 2, n]`, the gate's last): of fp8.
    out_dtype: of the result; x's, of fp8 bf16.

    Where `offs` descend or exceed the rows, a CPU raises InputError; a GPU makes the whole result NaN. Differentiable
    in x, w, gate, bias and row_weights, except of fp8. Raises InputError for arguments it cannot take.
    """
    beside = {"bias": bias, "gate": gate, "rows": rows, "into": into, "row_weights": row_weights}
    check_tensors({"x": x, "w": w, "offs": offs}, beside | {"scale_x": scale_x, "scale_w": scale_w})
    if out_dtype is None:
        out_dtype = torch.bfloat16 if scale_x is not None else x.dtype
    optional = bias, gate, activation or "", rows, into, row_weights, scale_x, scale_w
    call = Grouped(x, w, offs, *optional, out_dtype, gating or ())
    check(call)
    return cast(torch.Tensor, torch.ops.overweave.grouped_matmul(*call))


def grouped_outer(x: torch.Tensor, g: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Compute `x[group].T @ g[group]` of every group: the gradient of the weights of a grouped matmul.

    x `[rows, k]`, g `[rows, n]`: of one dtype, bf16, fp16 or fp32. offs: as of `grouped_matmul`. Returns `[experts, k,
    n]` in that dtype, summed in fp32; zeros for an expert without rows.
    """
    return cast(torch.Tensor, torch.ops.overweave.grouped_outer(x, g, offs))


def _matmul(*arguments: Any) -> torch.Tensor:
    call = Grouped(*arguments)
    if call.x.device.type == "cpu":
        return reference.multiply(call)
    return load("gpu grouped")(call)  # type: ignore[no-any-return]


def _matmul_fake(*arguments: Any) -> torch.Tensor:
    call = Grouped(*arguments)
    return call.x.new_empty((call.pairs, call.w.shape[2]), dtype=call.out_dtype)


def _outer(x: torch.Tensor, g: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu":
        return reference.outer(x, g, offs)
    return load("gpu grouped outer")(x, g, offs)  # type: ignore[no-any-return]


def _outer_fake(x: torch.Tensor, g: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return x.new_empty((offs.shape[0], x.shape[1], g.shape[1]))


def _clear(x: torch.Tensor, offs: torch.Tensor) -> None:
    if x.device.type == "cpu":
        x[int(offs[-1]) if offs.numel() else 0 :] = 0
    else:
        load("gpu grouped clear")(x, offs)


_MATMUL = (
    "(Tensor x, Tensor w, Tensor offs, Tensor? bias, Tensor? gate, str activation, Tensor? rows, Tensor? into, "
    "Tensor? row_weights, Tensor? scale_x, Tensor? scale_w, ScalarType out_dtype, float[] gating) -> Tensor"
)
for _op in (
    TorchOp("grouped_matmul", _MATMUL, _matmul, _matmul_fake, gradients.backward, gradients.keep),
    TorchOp("grouped_outer", "(Tensor x, Tensor g, Tensor offs) -> Tensor", _outer, _outer_fake),
    TorchOp("grouped_rest_cleared", "(Tensor(a!) x, Tensor offs) -> ()", _clear, lambda x, offs: None),
):
    define(_op)
