"""`reduce_scatter(x @ w)`, the network busy while the tensor cores are."""

from __future__ import annotations

import torch

from overweave.errors import InputError
from overweave.ir.plan import Problem
from overweave.memory.group import Group
from overweave.ops.arguments import DTYPES, check_operands
from overweave.ops.dispatch import GroupLike, group_of, look_up, prepare, refuse

OPERATOR = "matmul_reduce_scatter"


def matmul_reduce_scatter(
    x: torch.Tensor, w: torch.Tensor, group: GroupLike = None, *, plan: str | None = None
) -> torch.Tensor:
    """y = this rank's rows of the sum over ranks of x @ w. Finished chunks travel while later tiles are computed.

    Plain torch:  partial = x @ w; dist.all_reduce(partial); y = torch.chunk(partial, W)[rank]

    x: `[m, k]`, bf16, fp16 or fp32 (never TF32), row-major; k is this rank's part of the reduced axis. w: `[k, n]`, in
    either memory layout. Returns y `[m/W, n]`: if W does not divide m, ceil(m/W) rows each until none are left.
    Partials travel in the dtype of x and are summed in fp32, in rank order, rounded once; rings sum in the order in
    which they pass, the next rank first and the own one last, each hop rounded. The same bits every time.
    group: a ProcessGroup, its name, a 1-D DeviceMesh, or None for the world. plan: a schedule of the catalog by its
    short name (`scatter pieces=2`); None: chosen, see `overweave.explain`.

    Raises InputError or GroupError for arguments it cannot take, RankMismatch on every rank if ranks differ, PeerError
    for a peer that died or stalled, at this call or, on a GPU, at the next one. Source: Flux (arXiv 2406.06858) 4.2.
    """
    resolved = group_of(group)
    key, prepared = look_up(resolved, OPERATOR, (x, w), {"plan": plan})
    tensors = {"x": x, "w": w}
    if prepared is None:
        prepared = prepare(key, _checked(x, w, resolved), resolved, tensors, plan)
    prepared(tensors)
    return tensors["y"]


def _checked(x: torch.Tensor, w: torch.Tensor, group: Group) -> Problem:
    try:
        return _problem(x, w, group)
    except InputError as error:
        raise refuse(group, error) from None


def _problem(x: torch.Tensor, w: torch.Tensor, group: Group) -> Problem:
    check_operands(OPERATOR, x, w)
    return Problem(
        operator=OPERATOR,
        m=x.shape[0],
        n=w.shape[1],
        k=x.shape[1],
        world_size=group.world_size,
        dtype=DTYPES[x.dtype],  # type: ignore[arg-type]
        b_is_transposed=not w.is_contiguous(),
    )
