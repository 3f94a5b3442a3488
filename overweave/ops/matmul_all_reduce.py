"""`all_reduce(x @ w)`, the network busy while the tensor cores are."""

from __future__ import annotations

from typing import overload

import torch
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.epilogue import Z
from overweave.ir.plan import Problem
from overweave.memory.group import Group
from overweave.ops.devices import is_away, run_on
from overweave.ops.dispatch import GroupLike, group_of, look_up, prepare, refuse
from overweave.ops.eager import eagerly, is_read_by_compiler
from overweave.ops.epilogue import Extras
from overweave.ops.norm import RmsNorm, checked_norm
from overweave.ops.partials import problem_of_partials
from overweave.ops.scales import dtype_of

OPERATOR = "matmul_all_reduce"


@overload
def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    extras: Extras | None = None,
    norm: None = None,
    plan: str | None = None,
) -> torch.Tensor: ...


@overload
def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    extras: Extras | None = None,
    norm: RmsNorm,
    plan: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    extras: Extras | None = None,
    norm: RmsNorm | None = None,
    plan: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y = the sum over ranks of x @ w, on every rank. Sums of finished pieces travel while later tiles are computed.

    Plain torch:  y = x @ w; dist.all_reduce(y)
                  of fp8:  y = torch._scaled_mm(x, w, scale_x, scale_w, out_dtype=out_dtype); as before
                  with extras:  y = activation(y + bias) + residual
                  with a norm:  z = y + residual; normed = torch.nn.functional.rms_norm(z, (n,), weight, eps)

    x: `[m, k]`, bf16, fp16, fp8 or fp32 (never TF32), row-major; k is this rank's part of the reduced axis. w: `[k,
    n]`, in either memory layout. Returns y `[m, n]`, the same bits on every rank. Each rank waits for its peers'
    partials of what it sums, and for their sums.
    fp8: as in `matmul_reduce_scatter`, with `extras=ow.Extras(scale_x=, scale_w=, out_dtype=)`; a norm's tensors, the
    sum, z and the result are then of out_dtype.
    extras: `ow.Extras(bias=, activation=, residual=)`. bias: `[n]`. activation: `silu`, `gelu`, `gelu_tanh`, as
    torch.nn.functional has them. residual: `[m, n]`. Both the same on every rank, in the dtype of y. Done once to the
    sum, of a two-shot by the owner of the rows before it shares them: in fp32 before it is rounded wherever it is
    summed by us, and where the library sums (`sequential`) to what that rounded. torch's own all-reduces take none, and
    nor does a norm, which has a residual of its own.
    norm: `ow.RmsNorm(weight, residual=, eps=)`; then it returns (normed, z), both `[m, n]`, and y is nowhere. Every
    rank adds and norms in the pass that brings it the sums, so that nothing more than those travels. The sum, z and
    the result are rounded to the dtype of y, in every plan.
    Partials travel in the dtype of y and are summed in fp32, in rank order, rounded once: the same bits every time;
    the plans `sequential`, `torch.one_shot` and `torch.two_shot` leave both to the library and to torch.
    group: a ProcessGroup, its name, a 1-D DeviceMesh, or None for the world. plan: a schedule of the catalog by its
    short name (`two_shot pieces=2`); None: chosen, see `overweave.explain`.

    Raises InputError or GroupError for arguments it cannot take, RankMismatch on every rank if ranks differ, PeerError
    for a peer that died or stalled, at this call or, on a GPU, at the next one. Source: schedules/all_reduce.py.
    """
    if is_read_by_compiler():
        return eagerly(matmul_all_reduce, x, w, group, extras=extras, norm=norm, plan=plan)
    if is_away(x):
        return run_on(x.device, matmul_all_reduce, x, w, group, extras=extras, norm=norm, plan=plan)
    resolved = group_of(group)
    beside = () if extras is None is norm else (extras, norm)
    with resolved.turn:
        key, prepared = look_up(resolved, OPERATOR, (x, w), {"plan": plan}, beside)
        problem = prepared.problem if prepared else _checked(x, w, (extras, norm), resolved)
        tensors = {"x": x, "w": w}
        if extras is not None:
            tensors |= extras.tensors
        if norm is not None:
            tensors |= norm.tensors
        (prepared or prepare(key, problem, resolved, tensors, plan))(tensors)
    return tensors["y"] if norm is None else (tensors["y"], tensors[Z])


_Wanted = tuple[Extras | None, RmsNorm | None]  # what happens to the products, and to the rows of their sum


def _checked(x: torch.Tensor, w: torch.Tensor, wanted: _Wanted, group: Group) -> Problem:
    extras, norm = wanted
    try:
        problem = problem_of_partials(OPERATOR, x, w, group, extras)
        if norm is not None and problem.epilogue != problem.epilogue.of_parts:
            found, cure = f"extras {problem.epilogue} beside a norm", "Leave out one: a norm has a residual of its own"
            raise InputError(f"{OPERATOR}: norm", found, cure)
        summed = x.new_empty(0, dtype=dtype_of(problem.result_dtype))
        return replace(problem, norm=checked_norm(OPERATOR, norm, (problem.m, problem.n), summed))
    except InputError as error:
        raise refuse(group, error) from None
