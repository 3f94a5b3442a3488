"""`all_gather(x_shard) @ w`, the network busy while the tensor cores are."""

from __future__ import annotations

from functools import partial
from typing import Literal, overload

import torch

from overweave.errors import InputError
from overweave.ir.plan import LONGEST_LIST, Problem, numbered
from overweave.ir.shards import shard_rows
from overweave.memory.group import Group
from overweave.ops.arguments import DTYPES, check_operands
from overweave.ops.devices import is_away, run_on
from overweave.ops.dispatch import GroupLike, Weights, group_of, look_up, prepare, refuse
from overweave.ops.eager import eagerly, is_read_by_compiler
from overweave.ops.epilogue import Extras, checked_epilogue
from overweave.ops.scales import FP8, name_of

OPERATOR = "all_gather_matmul"
WEIGHTS = tuple(numbered("w", index) for index in range(LONGEST_LIST))
PRODUCTS = tuple(numbered("y", index) for index in range(LONGEST_LIST))
Products = tuple[torch.Tensor, ...]


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


@overload
def all_gather_matmul(
    x_shard: torch.Tensor,
    w: list[torch.Tensor] | tuple[torch.Tensor, ...],
    group: GroupLike = None,
    *,
    m: int | None = None,
    extras: Extras | None = None,
    return_gathered: Literal[False] = False,
    plan: str | None = None,
) -> Products: ...


@overload
def all_gather_matmul(
    x_shard: torch.Tensor,
    w: list[torch.Tensor] | tuple[torch.Tensor, ...],
    group: GroupLike = None,
    *,
    m: int | None = None,
    extras: Extras | None = None,
    return_gathered: Literal[True],
    plan: str | None = None,
) -> tuple[Products, torch.Tensor]: ...


def all_gather_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...],
    group: GroupLike = None,
    *,
    m: int | None = None,
    extras: Extras | None = None,
    return_gathered: bool = False,
    plan: str | None = None,
) -> torch.Tensor | Products | tuple[torch.Tensor | Products, torch.Tensor]:
    """y = all_gather(x_shard) @ w. Each rank waits for its peers' shards, chunk by chunk, while it multiplies.

    Plain torch:  x = torch.cat(shards of all ranks, in rank order); y = x @ w, or with extras
                  y = activation(x @ w + bias) + residual, or y = (x @ w) * activation(x @ gate) + residual
                  of several weights: ys = tuple(x @ each for each in w), over one gather

    x_shard: `[m/W, k]`, bf16, fp16, fp8 or fp32 (never TF32), row-major. w: `[k, n]`, in either memory layout, the same
    shape on every rank. Returns y `[m, n]`, and x `[m, k]` as well if `return_gathered`,
    bit for bit.
    w, a list or tuple of weights `[k, n_i]` in one layout (query, key and value; gate and up): returns a tuple of
    `[m, n_i]`, each a tensor of its own. What arrives is multiplied by all of them: one kernel takes up to three,
    library plans any number. Of extras they take no residual and no gate; the activation is that of all, bias and
    scale_w have the columns of all, side by side.
    extras: `ow.Extras(bias=, activation=, residual=, gate=)`. bias: `[n]`. activation: `silu`, `gelu`, `gelu_tanh`, as
    torch.nn.functional has them. residual: `[m, n]`, each rank's own. gate: `[k, n]`, laid out as w, without bias: with
    `silu`, SwiGLU; a kernel computes both products of a tile from the same rows of x. The gate has the dtype of x, bias
    and residual that of y; a fused kernel applies them in fp32 before it rounds, the library one by one.
    fp8: x and w torch.float8_e4m3fn, w stored as [n, k] (pass `weight.t()`), k and n multiples of 16, and
    `extras=ow.Extras(scale_x=, scale_w=, out_dtype=)` as torch._scaled_mm takes them: y = (x @ w) * scale_x * scale_w.
    Scales of rows are those of the shard; they travel with it. A gate is fp8 too, scale_w has its scales behind w's.
    m: rows after the gather, by default W times the shard's. If W does not divide it, ranks hold the shards that
    `torch.chunk(x, W)` deals: ceil(m/W) rows each until none are left.
    group: a ProcessGroup, its name, a 1-D DeviceMesh, or None for the world. plan: a schedule of the catalog by its
    short name (`push pieces=4`); None: chosen, see `overweave.explain`.

    Raises InputError or GroupError for arguments it cannot take, RankMismatch on every rank if ranks differ, PeerError
    for a peer that died or stalled, at this call or, on a GPU, at the next one. Source: Flux (arXiv 2406.06858) 4.3.
    """
    if is_read_by_compiler():
        return eagerly(
            all_gather_matmul, x_shard, w, group, m=m, extras=extras, return_gathered=return_gathered, plan=plan
        )
    if is_away(x_shard):
        call = partial(all_gather_matmul, m=m, extras=extras, return_gathered=return_gathered, plan=plan)
        return run_on(x_shard.device, call, x_shard, w, group)
    resolved = group_of(group)
    weights: Weights = tuple(w) if isinstance(w, (list, tuple)) else (w,)
    options = {"m": m, "return_gathered": return_gathered, "plan": plan}
    with resolved.turn:
        key, prepared = look_up(resolved, OPERATOR, (x_shard, *weights), options, () if extras is None else (extras,))
        problem = prepared.problem if prepared else _checked(x_shard, weights, m, resolved, (return_gathered, extras))
        tensors = {"x": x_shard, "w": weights[0]}
        if len(weights) > 1:
            tensors |= zip(WEIGHTS, weights, strict=False)
        if extras is not None:
            tensors |= extras.tensors
        (prepared or prepare(key, problem, resolved, tensors, plan))(tensors)
    y = tensors["y"] if weights[0] is w else tuple([tensors[name] for name in PRODUCTS[: len(weights)]])
    return (y, tensors["gathered_out"]) if return_gathered else y


_Wanted = tuple[bool, Extras | None]  # the gathered input too, and what happens to the product


def _checked(x: torch.Tensor, weights: Weights, m: int | None, group: Group, wanted: _Wanted) -> Problem:
    try:
        return _problem(x, weights, m, group, wanted)
    except InputError as error:
        raise refuse(group, error) from None


def _problem(x: torch.Tensor, weights: Weights, m: int | None, group: Group, wanted: _Wanted) -> Problem:
    returns_gathered, extras = wanted
    is_transposed = check_operands(OPERATOR, x, *weights, dtypes=(*DTYPES, FP8))
    rows = x.shape[0] * group.world_size if m is None else m
    if rows < 0:
        raise InputError(f"{OPERATOR}: m, the rows after the gather", f"got {m}", "Pass an int >= 0, or None")
    lo, hi = shard_rows(rows, group.world_size, group.rank)
    if x.shape[0] != hi - lo:
        found = f"rank {group.rank} of {group.world_size} holds {x.shape[0]} rows, not {hi - lo}"
        raise InputError(f"{OPERATOR}: shards of m={rows} rows", found, "Deal rows as torch.chunk does, or pass m")
    columns = tuple(w.shape[1] for w in weights)
    n = sum(columns)
    return Problem(
        operator=OPERATOR,
        m=rows,
        n=n,
        k=x.shape[1],
        world_size=group.world_size,
        dtype=name_of(x.dtype),
        b_is_transposed=is_transposed,
        returns_gathered=returns_gathered,
        epilogue=checked_epilogue(OPERATOR, extras, rows, (x, *weights)),
        columns=columns if len(columns) > 1 else (),
        out_dtype=name_of(extras.scales.result_dtype(x)) if extras and x.dtype == FP8 else None,
    )
