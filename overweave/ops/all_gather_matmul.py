"""`all_gather(x_shard) @ w`, the network busy while the tensor cores are."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import torch

from overweave.ir.operators.all_gather_matmul import OPERATOR
from overweave.ops.call.groups import GroupLike
from overweave.ops.dispatch.call import call
from overweave.ops.dispatch.library import define
from overweave.ops.dispatch.schema import PRODUCTS
from overweave.ops.keywords import OneWeight, SeveralWeights

define(OPERATOR)
Products = tuple[torch.Tensor, ...]
Weights = list[torch.Tensor] | tuple[torch.Tensor, ...]


@overload
def all_gather_matmul(
    x_shard: torch.Tensor, w: torch.Tensor, group: GroupLike = None, *, return_gathered: Literal[False] = False,
    **keywords: Unpack[OneWeight],
) -> torch.Tensor: ...  # fmt: skip
@overload
def all_gather_matmul(
    x_shard: torch.Tensor, w: torch.Tensor, group: GroupLike = None, *, return_gathered: Literal[True],
    **keywords: Unpack[OneWeight],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def all_gather_matmul(
    x_shard: torch.Tensor, w: Weights, group: GroupLike = None, *, return_gathered: Literal[False] = False,
    **keywords: Unpack[SeveralWeights],
) -> Products: ...  # fmt: skip
@overload
def all_gather_matmul(
    x_shard: torch.Tensor, w: Weights, group: GroupLike = None, *, return_gathered: Literal[True],
    **keywords: Unpack[SeveralWeights],
) -> tuple[Products, torch.Tensor]: ...  # fmt: skip
def all_gather_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor | Weights,
    group: GroupLike = None,
    *,
    m: int | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_gathered: bool = False,
    plan: str | None = None,
    **others: object,
) -> torch.Tensor | Products | tuple[torch.Tensor | Products, torch.Tensor]:
    """y = all_gather(x_shard) @ w. Each rank waits for its peers' shards, chunk by chunk, while it multiplies.

    Plain torch:  x = torch.cat(shards of all ranks, in rank order)
                  y = activation(x @ w + bias) + residual, or y = (x @ w) * activation(x @ gate) + residual
                  of several weights: ys = tuple(activation(x @ each + its bias) for each in w), over one gather

    x_shard: `[m/W, k]`, bf16, fp16, fp8 or fp32 (never TF32), row-major. w: `[k, n]`, in either memory layout, the same
    shape on every rank. Returns y `[m, n]`, and x `[m, k]` as well if `return_gathered`,
    bit for bit.
    w, a list or tuple of weights `[k, n_i]` in one layout (query, key and value; gate and up): returns a tuple of
    `[m, n_i]`, each a tensor of its own. What arrives is multiplied by all of them: one kernel takes up to three,
    library plans any number. Several weights take no residual and no gate; the activation is that of all, bias and
    scale_w have the columns of all, side by side.
    bias: `[n]`. activation: `silu`, `gelu`, `gelu_tanh`, as torch.nn.functional has them. residual: `[m, n]`, each
    rank's own. gate: `[k, n]`, laid out as w, without bias: with `silu`, SwiGLU; with `gelu`, GEGLU; a kernel computes
    both products of a tile from the same rows of x. The gate has the dtype of x, bias and residual that of y; a fused
    kernel applies them in fp32 before it rounds, the library one by one.
    fp8: x and w torch.float8_e4m3fn, w stored as [n, k] (pass `weight.t()`), k and n multiples of 16. It needs scale_x
    and scale_w, fp32, as torch._scaled_mm takes them: y = (x @ w) * scale_x * scale_w. They have one element each, the
    same scale_x on every rank; or scale_x is `[m/W, 1]`, of the shard's rows, with which it travels, and scale_w
    `[1, n]`. A gate is fp8 too, and scale_w has its scales behind w's: two elements, or `[1, 2n]`. out_dtype: of y,
    bias and residual; bf16 if None.
    m: rows after the gather, by default W times the shard's. If W does not divide it, ranks hold the shards that
    `torch.chunk(x, W)` deals: ceil(m/W) rows each until none are left.
    group: a ProcessGroup, its name, a 1-D DeviceMesh, or None for the world. plan: a schedule of the catalog by its
    short name (`push pieces=4`); None: chosen, see `overweave.explain`.

    Raises InputError or GroupError for arguments it cannot take, RankMismatch on every rank if ranks differ, PeerError
    for a peer that died or stalled, at this call or, on a GPU, at the next one. Source: Flux (arXiv 2406.06858) 4.3.
    """
    given = {
        "x": x_shard, "w": w, "m": m, "bias": bias, "activation": activation, "residual": residual, "gate": gate,
        "scale_x": scale_x, "scale_w": scale_w, "out_dtype": out_dtype, "return_gathered": return_gathered,
        "plan": plan, **others,
    }  # fmt: skip
    tensors = call(OPERATOR, group, given)
    y = tuple(map(tensors.__getitem__, PRODUCTS[: len(w)])) if isinstance(w, (list, tuple)) else tensors["y"]
    return (y, tensors["gathered_out"]) if return_gathered else y
