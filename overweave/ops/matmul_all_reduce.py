"""`all_reduce(x @ w)`, the network busy while the tensor cores are."""

from __future__ import annotations

from typing import overload

import torch

from overweave.errors import InputError
from overweave.ir.epilogue import Z
from overweave.ir.plan import Problem
from overweave.memory.group import Group
from overweave.ops.arguments import DTYPES, check_operands
from overweave.ops.dispatch import GroupLike, group_of, look_up, prepare, refuse
from overweave.ops.norm import RmsNorm, checked_norm, told_of

OPERATOR = "matmul_all_reduce"


@overload
def matmul_all_reduce(
    x: torch.Tensor, w: torch.Tensor, group: GroupLike = None, *, norm: None = None, plan: str | None = None
) -> torch.Tensor: ...


@overload
def matmul_all_reduce(
    x: torch.Tensor, w: torch.Tensor, group: GroupLike = None, *, norm: RmsNorm, plan: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]: ...


def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    norm: RmsNorm | None = None,
    plan: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y = the sum over ranks of x @ w, on every rank. Sums of finished pieces travel while later tiles are computed.

    Plain torch:  y = x @ w; dist.all_reduce(y)
                  with a norm:  z = y + residual; normed = torch.nn.functional.rms_norm(z, (n,), weight, eps)

    x: `[m, k]`, bf16, fp16 or fp32 (never TF32), row-major; k is this rank's part of the reduced axis. w: `[k, n]`, in
    either memory layout. Returns y `[m, n]`, the same bits on every rank. Each rank waits for its peers' partials of
    what it sums, and for their sums.
    norm: `ow.RmsNorm(weight, residual=, eps=)`; then it returns (normed, z), both `[m, n]`, and y is nowhere. Every
    rank adds and norms in the pass that brings it the sums, so that nothing more than those travels. The sum, z and
    the result are rounded to the dtype of x, in every plan.
    Partials travel in the dtype of x and are summed in fp32, in rank order, rounded once: the same bits every time;
    the plans `sequential`, `torch.one_shot` and `torch.two_shot` leave both to the library and to torch.
    group: a ProcessGroup, its name, a 1-D DeviceMesh, or None for the world. plan: a schedule of the catalog by its
    short name (`two_shot pieces=2`); None: chosen, see `overweave.explain`.

    Raises InputError or GroupError for arguments it cannot take, RankMismatch on every rank if ranks differ, PeerError
    for a peer that died or stalled, at this call or, on a GPU, at the next one. Source: schedules/all_reduce.py.
    """
    resolved = group_of(group)
    key, prepared = look_up(resolved, OPERATOR, (x, w), {"plan": plan}, told_of(norm))
    problem = prepared.problem if prepared else _checked(x, w, norm, resolved)
    tensors = {"x": x, "w": w} if norm is None else {"x": x, "w": w, **norm.tensors}
    (prepared or prepare(key, problem, resolved, tensors, plan))(tensors)
    return tensors["y"] if norm is None else (tensors["y"], tensors[Z])


def _checked(x: torch.Tensor, w: torch.Tensor, norm: RmsNorm | None, group: Group) -> Problem:
    try:
        check_operands(OPERATOR, x, w)
        finished = checked_norm(OPERATOR, norm, (x.shape[0], w.shape[1]), x)
    except InputError as error:
        raise refuse(group, error) from None
    return Problem(
        operator=OPERATOR,
        m=x.shape[0],
        n=w.shape[1],
        k=x.shape[1],
        world_size=group.world_size,
        dtype=DTYPES[x.dtype],  # type: ignore[arg-type]
        b_is_transposed=not w.is_contiguous(),
        norm=finished,
    )
