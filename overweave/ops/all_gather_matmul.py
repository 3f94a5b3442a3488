"""`all_gather(x_shard) @ w`, the network busy while the tensor cores are."""

from __future__ import annotations

from typing import Literal, overload

import torch

from overweave.errors import InputError
from overweave.ir.plan import Problem
from overweave.ir.shards import shard_rows
from overweave.memory.group import Group
from overweave.ops.arguments import DTYPES, check_operands
from overweave.ops.dispatch import GroupLike, group_of, key_of, prepare, prepared_call, refuse
from overweave.ops.epilogue import NO_EXTRAS, Extras, checked_epilogue, key_of_extras

OPERATOR = "all_gather_matmul"


@overload
def all_gather_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    m: int | None = None,
    extras: Extras | None = None,
    return_gathered: Literal[False] = False,
    plan: str | None = None,
) -> torch.Tensor: ...


@overload
def all_gather_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    m: int | None = None,
    extras: Extras | None = None,
    return_gathered: Literal[True],
    plan: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def all_gather_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    m: int | None = None,
    extras: Extras | None = None,
    return_gathered: bool = False,
    plan: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y = all_gather(x_shard) @ w. Each rank waits for its peers' shards, chunk by chunk, while it multiplies.

    Plain torch:  x = torch.cat(shards of all ranks, in rank order); y = x @ w, or with extras
                  y = activation(x @ w + bias) + residual

    x_shard: `[m/W, k]`, bf16, fp16 or fp32 (never TF32), row-major. w: `[k, n]`, in either memory layout, the same
    shape on every rank. Returns y `[m, n]`, and x `[m, k]` as well if `return_gathered`.
    extras: `ow.Extras(bias=, activation=, residual=)`. bias: `[n]`. activation: `silu`, `gelu` or `gelu_tanh`, as
    torch.nn.functional has them. residual: `[m, n]`, each rank's own. All in the dtype of x; a fused kernel applies
    them in fp32 before it rounds, the library one by one.
    m: rows after the gather, by default W times the shard's. If W does not divide it, ranks hold the shards that
    `torch.chunk(x, W)` deals: ceil(m/W) rows each until none are left.
    group: a ProcessGroup, its name, a 1-D DeviceMesh, or None for the world. plan: a schedule of the catalog by its
    short name (`push pieces=4`); None: chosen, see `overweave.explain`.

    Raises InputError or GroupError for arguments it cannot take, RankMismatch on every rank if ranks differ, PeerError
    for a peer that died or stalled, at this call or, on a GPU, at the next one. Source: Flux (arXiv 2406.06858) 4.3.
    """
    resolved = group_of(group)
    key = key_of(resolved, OPERATOR, x_shard, w, {"m": m, "return_gathered": return_gathered, "plan": plan})
    key += key_of_extras(extras)
    prepared = prepared_call(resolved, key)
    problem = prepared.problem if prepared else _checked(x_shard, w, m, resolved, (return_gathered, extras))
    extras = extras or NO_EXTRAS
    y = x_shard.new_empty((problem.m, problem.n))
    tensors = {"x": x_shard, "w": w, "y": y, **extras.tensors}
    if return_gathered:
        tensors["gathered_out"] = x_shard.new_empty((problem.m, problem.k))
    (prepared or prepare(key, problem, resolved, tensors, plan)).run(tensors)
    y = tensors["y"]
    return (y, tensors["gathered_out"]) if return_gathered else y


_Wanted = tuple[bool, Extras | None]  # the gathered input too, and what happens to the product


def _checked(x: torch.Tensor, w: torch.Tensor, m: int | None, group: Group, wanted: _Wanted) -> Problem:
    try:
        return _problem(x, w, m, group, wanted)
    except InputError as error:
        raise refuse(group, error) from None


def _problem(x: torch.Tensor, w: torch.Tensor, m: int | None, group: Group, wanted: _Wanted) -> Problem:
    returns_gathered, extras = wanted
    check_operands(OPERATOR, x, w)
    rows = x.shape[0] * group.world_size if m is None else m
    if rows < 0:
        raise InputError(f"{OPERATOR}: m, the rows after the gather", f"got {m}", "Pass an int >= 0, or None")
    lo, hi = shard_rows(rows, group.world_size, group.rank)
    if x.shape[0] != hi - lo:
        found = f"rank {group.rank} of {group.world_size} holds {x.shape[0]} rows, not {hi - lo}"
        raise InputError(f"{OPERATOR}: shards of m={rows} rows", found, "Deal rows as torch.chunk does, or pass m")
    return Problem(
        operator=OPERATOR,
        m=rows,
        n=w.shape[1],
        k=w.shape[0],
        world_size=group.world_size,
        dtype=DTYPES[x.dtype],  # type: ignore[arg-type]
        b_is_transposed=not w.is_contiguous(),
        returns_gathered=returns_gathered,
        epilogue=checked_epilogue(OPERATOR, extras, (rows, w.shape[1]), x),
    )
