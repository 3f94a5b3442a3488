"""The grouped matmul: rows that lie expert by expert, each group times its expert's weight."""

from __future__ import annotations

import torch

from overweave.runtime.library.epilogue import ACTIVATIONS


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
) -> torch.Tensor:
    """Multiply each group of rows by its expert's weight, as `torch.nn.functional.grouped_mm(x, w, offs=offs)`.

    x: `[rows, k]`, sorted by expert; bf16, fp16, fp32, or fp8 (e4m3) with scales. w: `[experts, k, n]`, k or n
    contiguous. offs: int32 `[experts]` on the device of x: where each expert's rows end, never descending. The result
    is `[rows, n]`; rows from `offs[-1]` on are not computed, and hold anything. Plain torch, of expert e and its
    rows `[lo, hi)`:

        value = x[lo:hi].float() @ w[e].float()                                      # x[rows[lo:hi]] with `rows`
        value *= scale_x[lo:hi, None] * scale_w[e]                                   # fp8
        value = value * act(x[lo:hi].float() @ gate[e].float()) if gate is given else act(value + bias[e])
        out[lo:hi] = (value * row_weights[lo:hi, None]).to(out_dtype)                # out[into[lo:hi]] with `into`

    bias: `[experts, n]`. gate: another weight of w's shape and layout; activation: `silu`, `gelu`, `gelu_tanh` or None.
    rows: int32 `[pairs]`, which row of x each row of the product is made of; the result has `pairs` rows.
    into: int32 `[pairs]`, where each row of the product is stored: no two at one place. An index out of range is never
    followed: such a row of x is NaN, such a row of the result is not stored.
    row_weights: fp32 `[pairs]`, by which each row of the result is multiplied last.
    scale_x: fp32 `[rows of x]`, scale_w: fp32 `[experts, n]` (with a gate `[experts, 2, n]`, the gate's last): of fp8.
    out_dtype: of the result; x's, of fp8 bf16.

    Where `offs` descend or exceed the rows, a CPU raises InputError; a GPU makes the whole result NaN. Differentiable
    in x, w, gate, bias and row_weights, except of fp8.
    """
    if rows is not None:
        x = x.index_select(0, rows)
    ends, wide = offs.tolist(), torch.float64 if x.dtype == torch.float64 else torch.float32
    parts = []
    for expert, (low, high) in enumerate(zip([0, *ends], ends, strict=False)):
        own = x[low:high].to(wide)
        value = own @ w[expert].to(wide)
        act = ACTIVATIONS[activation] if activation else lambda each: each
        if gate is not None:
            value = value * act(own @ gate[expert].to(wide))
        else:
            value = act(value if bias is None else value + bias[expert].to(wide))
        parts.append(value)
    parts.append(x.new_full((x.shape[0] - ends[-1], w.shape[2]), float("nan"), dtype=wide))
    out = torch.cat(parts)
    if row_weights is not None:
        out = out * row_weights.unsqueeze(1)
    out = out.to(out_dtype or x.dtype)
    return out if into is None else torch.empty_like(out).index_copy(0, into.long(), out)
