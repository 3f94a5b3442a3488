"""`all_reduce(x @ w)`, the network busy while the tensor cores are."""

from __future__ import annotations

from typing import Unpack, overload

import torch

from overweave.ir.operators.forms import Z, results_beside
from overweave.ir.operators.matmul_all_reduce import OPERATOR
from overweave.ops.call.groups import GroupLike
from overweave.ops.call.norm import RmsNorm
from overweave.ops.call.side_by_side import SideBySideWeights
from overweave.ops.dispatch.call import call
from overweave.ops.dispatch.library import define
from overweave.ops.keywords import NormedSum, PlainSum

define(OPERATOR)
SumFactors = torch.Tensor | SideBySideWeights


@overload
def matmul_all_reduce(
    x: SumFactors, w: SumFactors, group: GroupLike = None, *, norm: None = None, plan: str | None = None,
    **keywords: Unpack[PlainSum],
) -> torch.Tensor: ...  # fmt: skip
@overload
def matmul_all_reduce(
    x: SumFactors, w: SumFactors, group: GroupLike = None, *, norm: RmsNorm, plan: str | None = None,
    **keywords: Unpack[NormedSum],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def matmul_all_reduce(
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
    **others: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y = the sum over ranks of x @ w, on every rank. Sums of finished pieces travel while later tiles are computed.

    Plain torch:  partial = x @ w, or of fp8 torch._scaled_mm(x, w, scale_x, scale_w, out_dtype=out_dtype)
                  dist.all_reduce(partial); y = activation(partial + bias) + residual
                  with a norm:  z = partial + residual; normed = torch.nn.functional.rms_norm(z, (n,), weight, eps)

    x: `[m, k]`, bf16, fp16, fp8 or fp32 (never TF32), row-major; k is this rank's part of the reduced axis. w: `[k,
    n]`, in either memory layout. Returns y `[m, n]`, the same bits on every rank. Each rank waits for its peers'
    partials of what it sums, and for their sums.
    x and w, lists of one length: as in `matmul_reduce_scatter`.
    bias: `[n]`. activation: `silu`, `gelu`, `gelu_tanh`, as torch.nn.functional has them. residual: `[m, n]`. Both
    tensors the same on every rank, in the dtype of y. Done once to the sum, of a two-shot by the owner of the rows
    before it shares them: in fp32 before it is rounded wherever it is summed by us, and where the library sums
    (`sequential`) to what that rounded. torch's own all-reduces take none.
    fp8: as in `matmul_reduce_scatter`; a norm's tensors, the sum, z and the result are of out_dtype.
    norm: `ow.RmsNorm(weight, eps=)`; then the call returns (normed, z), both `[m, n]`, and y is nowhere. The residual
    may be passed as `ow.RmsNorm(weight, residual)` as well; a norm takes no bias and no activation. Every rank adds and
    norms in the pass that brings it the sums, so that nothing more than those travels. The sum, z and the result are
    rounded to the dtype of y, in every plan.
    Partials travel in the dtype of y and are summed in fp32, in rank order, rounded once: the same bits every time;
    the plans `sequential`, `torch.one_shot` and `torch.two_shot` leave both to the library and to torch.
    group: a ProcessGroup, its name, a 1-D DeviceMesh, or None for the world. plan: a schedule of the catalog by its
    short name (`two_shot pieces=2`); None: chosen, see `overweave.explain`.

    Raises InputError or GroupError for arguments it cannot take, RankMismatch on every rank if ranks differ, PeerError
    for a peer that died or stalled, at this call or, on a GPU, at the next one. Source:
    schedules/methods/reductions.py.
    """
    given = {
        "x": x, "w": w, "bias": bias, "activation": activation, "residual": residual, "scale_x": scale_x,
        "scale_w": scale_w, "out_dtype": out_dtype, "norm": norm, "plan": plan, **others,
    }  # fmt: skip
    made = call(OPERATOR, group, given)
    if others:  # registered forms, of which those of whole rows make other results
        names = results_beside(others, ("y",))
        return made[names[0]] if len(names) == 1 else (made[names[0]], made[names[1]])
    return made["y"] if norm is None else (made["y"], made[Z])
