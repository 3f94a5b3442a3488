"""`reduce_scatter(x @ w)`, the network busy while the tensor cores are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Never, Unpack, overload

import torch

from overweave.ir.operators.forms import Z, results_beside
from overweave.ir.operators.matmul_reduce_scatter import OPERATOR
from overweave.ops.call.groups import GroupLike
from overweave.ops.call.norm import RmsNorm
from overweave.ops.call.row_map import ROWS, ROWS_OF_ALL, RowMap
from overweave.ops.call.side_by_side import SideBySideWeights
from overweave.ops.dispatch.call import call
from overweave.ops.dispatch.library import define
from overweave.ops.keywords import NormedSum, PlainSum

define(OPERATOR)
SumFactors = torch.Tensor | SideBySideWeights
Returned = (
    torch.Tensor
    | tuple[torch.Tensor, RowMap]
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, RowMap]
)


@overload
def matmul_reduce_scatter(
    x: SumFactors,
    w: SumFactors,
    group: GroupLike = None,
    *,
    norm: None = None,
    plan: None = None,
    **keywords: Unpack[PlainSum],
) -> torch.Tensor: ...
@overload
def matmul_reduce_scatter(
    x: SumFactors, w: SumFactors, group: GroupLike = None, *, norm: None = None, plan: str | None = None,
    **keywords: Unpack[PlainSum],
) -> torch.Tensor | tuple[torch.Tensor, RowMap]: ...  # fmt: skip
@overload
def matmul_reduce_scatter(
    x: SumFactors,
    w: SumFactors,
    group: GroupLike = None,
    *,
    norm: RmsNorm,
    plan: None = None,
    **keywords: Unpack[NormedSum],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def matmul_reduce_scatter(
    x: SumFactors, w: SumFactors, group: GroupLike = None, *, norm: RmsNorm, plan: str | None = None,
    **keywords: Unpack[NormedSum],
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, RowMap]: ...  # fmt: skip
def matmul_reduce_scatter(
    x: SumFactors,
    w: SumFactors,
    group: GroupLike = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    norm: RmsNorm | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    plan: str | None = None,
    **others: Never,
) -> Returned:
    """y = this rank's rows of the sum over ranks of x @ w. Finished chunks travel while later tiles are computed.

    Plain torch:  partial = x @ w, or of fp8 torch._scaled_mm(x, w, scale_x, scale_w, out_dtype=out_dtype)
                  dist.all_reduce(partial); y = activation(torch.chunk(partial, W)[rank] + bias) + residual
                  with a norm:  z = y; normed = torch.nn.functional.rms_norm(z, (n,), weight, eps)

    x: `[m, k]`, bf16, fp16, fp8 or fp32 (never TF32), row-major; k is this rank's part of the reduced axis. w: `[k,
    n]`, in either memory layout. Returns y `[m/W, n]`: if W does not divide m, ceil(m/W) rows each until none are left.
    Partials travel in the dtype of y and are summed in fp32, in rank order, rounded once; rings sum in the order in
    which they pass, the next rank first and the own one last, each hop rounded. The same bits every time, but for
    `plan="remote_add"`, chosen by this argument alone: it adds in fp32 as parts come, and last bits may differ.
    x and w, lists of one length: y is that of `sum(a @ b for a, b in zip(x, w))`, `[m, k_i]` and `[k_i, n]`. Each rank
    sums its products in fp32 in one matmul; plans of the library run two, and round the first product. On a GPU two
    pairs are not copied; of more pairs all but the widest are laid side by side. All are on a CPU, and where the widest
    k_i is no multiple of 128. A group of one copies nothing, and adds product to product.
    bias: `[n]`, the same on every rank. activation: `silu`, `gelu`, `gelu_tanh`, as torch.nn.functional has them.
    residual: `[S, n]` for the own S rows. In the dtype of y, and done once, by the owner, to the sum: in fp32 before it
    is rounded where we sum, and where the library does (`sequential`) to what that rounded. torch's own take none.
    norm: as in `matmul_all_reduce`, of the own rows alone; then the call returns (normed, z), both `[m/W, n]`, and the
    gradient of the norm's weight, which all ranks have alike, is summed over them. Refused by plans whose tiles add
    (`fused_ring`, `scatter sums=epilogue`, ..), by `decomposed` and by `remote_add`; None chooses none of these.
    fp8: x and w torch.float8_e4m3fn, w stored as [n, k] (pass `weight.t()`), k and n multiples of 16. It needs scale_x
    and scale_w, fp32, each rank's own: one element each, or `[m, 1]` and `[1, n]`. Each partial is scaled in fp32
    before it is rounded to out_dtype (bf16 if None) and sent; sums are of scaled partials. So the result is no further
    from the truth than plain torch, whose collective rounds as it adds.
    group: a ProcessGroup, its name, a 1-D DeviceMesh, or None for the world. plan: a schedule of the catalog by its
    short name (`scatter pieces=2`); None: chosen, see `overweave.explain`. `plan="waves rows=cyclic"`, which nothing
    but this argument chooses, returns `(y, rows)`, or `(normed, z, rows)`: m/W rows that lie in strips all over the
    whole, and the RowMap says which. W must divide m. A residual has the rows of y: `residual[rows.rows]`, once they
    are known. Not of lists, and not under autograd, autocast or a compiler.

    Raises InputError or GroupError for arguments it cannot take, RankMismatch on every rank if ranks differ, PeerError
    for a peer that died or stalled, at this call or, on a GPU, at the next one. Source: Flux (arXiv 2406.06858) 4.2.
    """
    given = {
        "x": x, "w": w, "bias": bias, "activation": activation, "residual": residual, "scale_x": scale_x,
        "scale_w": scale_w, "out_dtype": out_dtype, "norm": norm, "plan": plan, **others,
    }  # fmt: skip
    made = call(OPERATOR, group, given)
    return _with_others(made, others) if others or Z in made or ROWS in made else made["y"]


def _with_others(made: dict[str, torch.Tensor], others: Mapping[str, object]) -> Returned:
    """The rows with those before a norm, with a map of where they lie, or with both; or what a form of whole rows makes
    in their place."""
    found = (made["y"], made[Z]) if Z in made else tuple(made[name] for name in results_beside(others, ("y",)))
    if ROWS in made:
        return (*found, RowMap(made[ROWS], made[ROWS_OF_ALL]))  # type: ignore[return-value]
    return found if len(found) > 1 else found[0]  # type: ignore[return-value]
