"""Gradients of x and w of the operators: that of x is a call of the dual operator, that of w a local matmul.

    y = gather(x) @ w          dx = scatter(dy @ w.T)      dw = gather(x).T @ dy
    y = scatter(x @ w)         dx = gather(dy) @ w.T       dw = x.T @ gather(dy)
    y = all_reduce(x @ w)      dx = dy @ w.T               dw = x.T @ dy
    y = all_to_all(x) @ w      dx = all_to_all(dy @ w.T)   dw = all_to_all(x).T @ dy
    y = all_to_all(x @ w)      dx = all_to_all(dy) @ w.T   dw = x.T @ all_to_all(dy)

The gradient of a norm's weight is of all rows: after a scatter, whose ranks norm their own rows, it is all-reduced. The
dual of a gather with several weights sums several products before one scatter, and vice versa.

Under `create_graph=True` the collectives that go with the products are differentiable ones: a tensor that is the same
on all ranks, and that each uses for its own part, such as the dy of an all-reduce, has a gradient that is summed over
ranks (`replicated`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from overweave.compat.torch_names import all_gather_single, all_to_all_single_autograd, c10d_functional
from overweave.errors import InputError
from overweave.ir.counts import COUNTS, Counts
from overweave.ir.operators.record import Operator
from overweave.ir.operators.registry import record_of
from overweave.ops.call.collective import run_collective
from overweave.ops.call.counts import RowCounts
from overweave.ops.call.groups import group_of
from overweave.ops.call.surroundings import is_watched
from overweave.ops.dispatch.collectives import (
    Exchange,
    all_gather_rows,
    all_reduce_rows,
    own_rows,
    reduce_scatter_rows,
    replicated,
)
from overweave.ops.dispatch.fake import register_flop_formulas
from overweave.ops.dispatch.route import group_rank_of, told_of
from overweave.ops.dispatch.schema import DEFINED, to_schema_call

Maybe = torch.Tensor | None


class CallInfo(NamedTuple):
    """What the backward of a call needs besides tensors.

    m: rows of the whole product. save: what a gather saves of x: `gathered`, `shard` or `columns`. plan: of the call,
    and of the operator that gathers saved columns again; dual_plan: of the dual operator. counts, most: rows that ranks
    exchange, and a rank's capacity.
    """

    operator: Operator
    group_name: str
    world_size: int
    rank: int
    m: Any
    save: str
    plan: str | None
    dual_plan: str | None
    counts: Counts | None = None
    most: int | None = None


class Gradients(NamedTuple):
    """Gradients of each x and each w, None if not needed, and of the bias of one product."""

    xs: list[Maybe]
    ws: list[Maybe]
    bias: Maybe = None


class NeededGradients(NamedTuple):
    """Which gradients are needed, as `ctx.needs_input_grad`."""

    xs: list[bool]
    ws: list[bool]
    bias: bool = False


def gradients_of(info: CallInfo, needed: NeededGradients, dys: list[Maybe], xs: list[Any], ws: list[Any]) -> Gradients:
    """Return the gradients of a call. Collective: all ranks need the same ones.

    dys: gradients of the products, None for a product that nothing reads. xs: x, or what was saved of it (`save`).
    """
    if info.operator.gathers and not info.operator.exchanges:
        return _gather_gradients(info, needed, dys, xs, ws)
    (dy,) = dys
    if dy is None:
        return Gradients([None for _ in xs], [None for _ in ws])
    if info.operator.exchanges:
        return _exchange_gradients(info, needed, dy, xs[0], ws[0])
    return (_scatter_gradients if info.operator.scatters else _local_gradients)(info, needed, dy, xs, ws)


def _gather_gradients(
    info: CallInfo, needed: NeededGradients, dys: list[Maybe], xs: list[Any], ws: list[Any]
) -> Gradients:
    """Return the gradients of an all-gather matmul: dx by the dual (a reduce-scatter matmul), dw from gathered rows."""
    with_dy = [index for index, dy in enumerate(dys) if dy is not None]
    present_dys = [dys[index] for index in with_dy]
    dx: Maybe = None
    dws: list[Maybe] = [None for _ in dys]
    bias = torch.cat([_column_sums(dy, w) for dy, w in zip(dys, ws, strict=True)]) if needed.bias else None
    if not with_dy:
        return Gradients([None], dws, bias)
    if needed.xs[0]:
        (dx,) = _call_dual(info, present_dys, [ws[index].t() for index in with_dy])
    needed_ws = [index for index in with_dy if needed.ws[index]]
    if needed_ws and info.save == "columns":
        dws_found = _call_operator(
            info.operator, info, xs, [dys[index] for index in needed_ws], m=ws[0].shape[0], plan=info.plan
        )
        dws = [dws_found[needed_ws.index(index)] if index in needed_ws else None for index in range(len(dys))]
    elif needed_ws:
        rows = all_gather_rows_of(info, xs[0]) if info.save == "shard" else xs[0]
        dws = [
            _weight_gradient(rows, dys[index], ws[index]) if index in needed_ws else None for index in range(len(dys))
        ]
    return Gradients([dx], dws, bias)


def _scatter_gradients(
    info: CallInfo, needed: NeededGradients, dy: torch.Tensor, xs: list[Any], ws: list[Any]
) -> Gradients:
    """Return the gradients of a matmul reduce-scatter: dx by the dual (an all-gather matmul), dw from gathered dy."""
    ws_t = [w.t() for w, is_needed in zip(ws, needed.xs, strict=True) if is_needed]
    needs_rows, is_recorded = needed.bias or any(needed.ws), torch.is_grad_enabled()
    returns_rows = needs_rows and bool(ws_t) and not is_recorded
    dual_results = _call_dual(info, [dy], ws_t, m=info.m, return_gathered=returns_rows) if ws_t else []
    rows = dual_results.pop() if returns_rows else all_gather_rows_of(info, dy) if needs_rows else dy
    bias = None if not needed.bias else all_reduce_sum(info, dy.sum(0)) if is_recorded else rows.sum(0)
    dxs = [dual_results.pop(0) if is_needed else None for is_needed in needed.xs]
    dws = [
        _weight_gradient(x, rows, w) if is_needed else None for x, w, is_needed in zip(xs, ws, needed.ws, strict=True)
    ]
    return Gradients(dxs, dws, bias)


def _local_gradients(
    info: CallInfo, needed: NeededGradients, dy: torch.Tensor, xs: list[Any], ws: list[Any]
) -> Gradients:
    """Return the gradients of a product whose dy is the same on all ranks: plain matmuls."""
    rows = replicated(gradient_exchange(info), dy)
    dxs = [rows @ w.t() if is_needed else None for w, is_needed in zip(ws, needed.xs, strict=True)]
    dws = [
        _weight_gradient(x, rows, w) if is_needed else None for x, w, is_needed in zip(xs, ws, needed.ws, strict=True)
    ]
    return Gradients(dxs, dws, dy.sum(0) if needed.bias else None)


def _exchange_gradients(info: CallInfo, needed: NeededGradients, dy: torch.Tensor, x: Any, w: Any) -> Gradients:
    """Return the gradients of an all-to-all matmul: rows travel back, by transposed counts.

    dx by the dual operator; for dw the rows, or dy, go by a torch.distributed all-to-all first.
    """
    dx = dw = None
    return_counts = None if info.counts is None else transpose_counts(info.counts)
    if needed.xs[0]:
        (dx,) = _call_dual(info, [dy], [w.t()], counts=return_counts, most=info.most)
    if needed.ws[0]:
        gathers = info.operator.gathers
        rows = all_to_all_rows(info, x, info.counts) if gathers else x
        dw = _weight_gradient(rows, dy if gathers else all_to_all_rows(info, dy, return_counts), w)
    return Gradients([dx], [dw])


def _weight_gradient(x: torch.Tensor, dy: Any, w: torch.Tensor) -> Any:
    """Return x.T @ dy, in the memory layout of w, so that accumulating it into w.grad needs no copy."""
    return x.t() @ dy if w.is_contiguous() else (dy.t() @ x).t()


def _column_sums(dy: Maybe, w: torch.Tensor) -> torch.Tensor:
    """Return the bias gradient of one product: sums of dy's columns, or zeros of w's width without dy."""
    return w.new_zeros(w.shape[1]) if dy is None else dy.sum(0)


def _call_dual(info: CallInfo, xs: list[Any], ws: list[Any], **options: Any) -> list[torch.Tensor]:
    """Call the operator that computes the gradient of x, such as a matmul reduce-scatter for an all-gather matmul."""
    dual = info.operator.dual
    assert dual
    return _call_operator(record_of(dual), info, xs, ws, plan=info.dual_plan, **options)


def _call_operator(
    operator: Operator, info: CallInfo, xs: list[Any], ws: list[Any], **options: Any
) -> list[torch.Tensor]:
    """Call an operator: through its op if a tracer or mode watches, else directly. Return its results."""
    defined = DEFINED[operator.name]
    if is_watched():
        register_flop_formulas()
        schema_call = to_schema_call(defined.names, info.group_name, {"x": xs, "w": ws, **options})
        return list(defined.op(*schema_call.tensors, **schema_call.options, **told_of(group_rank_of(info.group_name))))
    x, w = (each if len(each) > 1 else each[0] for each in (xs, ws))
    return defined.eager(info.group_name, {"x": x, "w": w, **options})


def gradient_exchange(info: CallInfo) -> Exchange:
    """Return the group and the description that ranks compare, for collectives of gradients that autograd records."""
    return Exchange(group_rank_of(info.group_name), f"gradients of {info.operator.name}")


def all_gather_rows_of(info: CallInfo, rows: torch.Tensor) -> Any:
    """Return the rows of all ranks, `[m, cols]`, from shards as torch.chunk divides them, by torch.distributed."""
    if info.world_size == 1:
        return rows
    if torch.is_grad_enabled():
        return all_gather_rows(gradient_exchange(info), rows, info.m)
    shard_rows_padded = -(-info.m // info.world_size)
    padded = (
        rows
        if info.m % info.world_size == 0
        else torch.nn.functional.pad(rows, (0, 0, 0, shard_rows_padded - rows.shape[0]))
    )
    if is_watched():
        return _traced_collective("all_gather_into_tensor", padded.contiguous(), info.world_size, info.group_name)[
            : info.m
        ]
    # Not the functional collective: with GPU tensors and gloo it kills the process (torch 2.11).
    all_rows = rows.new_empty((shard_rows_padded * info.world_size, *rows.shape[1:]))
    run_collective(group_of(info.group_name), all_gather_single, all_rows, padded.contiguous())
    return all_rows[: info.m]


def transpose_counts(counts: Counts) -> list[list[int]]:
    """Transpose counts `[W, W]`: those of the same rows on their way back."""
    return [list(column) for column in zip(*counts, strict=True)]


def all_to_all_rows(info: CallInfo, rows: torch.Tensor, counts: Counts | None) -> torch.Tensor:
    """Return all ranks' rows for this one, in rank order, by a torch.distributed all-to-all. counts None: even."""
    even = [rows.shape[0] // info.world_size] * info.world_size
    sent, received = even, even
    if counts is not None:
        sent, received = list(counts[info.rank]), [row[info.rank] for row in counts]
    if torch.is_grad_enabled():
        moved: torch.Tensor = all_to_all_single_autograd(rows.contiguous(), received, sent, info.group_name)
        return moved
    if is_watched():
        return _traced_collective("all_to_all_single", rows.contiguous(), received, sent, info.group_name)
    received_rows = rows.new_empty((sum(received), *rows.shape[1:]))
    sides = received_rows, rows.contiguous(), received, sent
    run_collective(group_of(info.group_name), dist.all_to_all_single, *sides)
    return received_rows


def all_reduce_sum(info: CallInfo, part: torch.Tensor) -> torch.Tensor:
    """Sum each rank's part, fp32, over ranks, by torch.distributed; in place, unless recorded or traced."""
    if info.world_size == 1:
        return part
    if torch.is_grad_enabled():
        return all_reduce_rows(gradient_exchange(info), part)
    if is_watched():
        return _traced_collective("all_reduce", part, "sum", info.group_name)
    run_collective(group_of(info.group_name), dist.all_reduce, part)
    return part


def _traced_collective(collective: str, *arguments: Any) -> torch.Tensor:
    """Return the result of torch's functional collective of this name, which tracers can record."""
    result: torch.Tensor = c10d_functional.wait_tensor(getattr(c10d_functional, collective)(*arguments))
    return result


def add_own_rows(info: CallInfo, dx: Maybe, d_gathered: torch.Tensor, is_replicated: bool) -> torch.Tensor:
    """Return a shard's gradient plus its rows of the gathered tensor's gradient.

    is_replicated: that is the same on all ranks, as of rows that the call returned; else it is summed over ranks, as of
    saved rows that each rank's gradient of a weight has read.
    """
    exchange = gradient_exchange(info)
    shard_gradient = own_rows(exchange, d_gathered) if is_replicated else reduce_scatter_rows(exchange, d_gathered)
    return shard_gradient if dx is None else dx + shard_gradient


def norm_gradients(z: torch.Tensor, weight: torch.Tensor, eps: float, dy: torch.Tensor) -> tuple[Any, Any]:
    """Return the gradients of RMSNorm: of z in its dtype, and of the weight in fp32.

    y = z / sqrt(mean(z ** 2) + eps) * weight.
    """
    z32, scaled = z.float(), dy.float() * weight.float()
    inverse = torch.rsqrt(z32.square().mean(1, keepdim=True) + eps)
    normed = z32 * inverse
    dz = inverse * (scaled - normed * (scaled * normed).mean(1, keepdim=True))
    return dz.to(z.dtype), (dy.float() * normed).sum(0)


def call_info(operator: Operator, group_name: str, rows: Any, options: dict[str, Any]) -> CallInfo:
    """Return the CallInfo of a call on `rows` rows of x. Raises InputError for an unknown `save`."""
    place = group_rank_of(group_name)
    save = options.get("save", "gathered")
    if save not in ("gathered", "shard", "columns"):
        raise InputError(f"{operator.name}: save", f"got {save[:40]!r}", "Use one of gathered, shard, columns")
    world_size, m = place.world_size, options.get("m")
    if m is None:
        m = rows * world_size if operator.has_row_shards else rows
    if world_size == 1 or not operator.gathers:
        save = "gathered"  # x is all there is
    elif operator.exchanges:
        save = "shard"
    plans = options.get("plan"), options.get("backward_plan")
    counts = options.get(COUNTS)
    exchange = counts.rows if isinstance(counts, RowCounts) else counts, options.get("most")
    return CallInfo(operator, group_name, world_size, place.rank, m, save, *plans, *exchange)
