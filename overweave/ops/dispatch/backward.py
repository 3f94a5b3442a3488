"""The gradients of an operator's factors: x's is a call of the operator's dual, w's a local product.

    y = gather(x) @ w          dx = scatter(dy @ w.T)      dw = gather(x).T @ dy
    y = scatter(x @ w)         dx = gather(dy) @ w.T       dw = x.T @ gather(dy)
    y = all_reduce(x @ w)      dx = dy @ w.T               dw = x.T @ dy
    y = all_to_all(x) @ w      dx = all_to_all(dy @ w.T)   dw = all_to_all(x).T @ dy
    y = all_to_all(x @ w)      dx = all_to_all(dy) @ w.T   dw = x.T @ all_to_all(dy)

The gradient of the weight of a norm is that of all rows: behind a scatter, whose ranks norm their own rows, `summed`.
Of several weights over one gather, the dual sums several products before one scatter, and the other way round.

Under `create_graph=True`, where torch records what a backward pass computes, the collectives beside the products are
differentiable ones: a tensor that all ranks have alike and each uses for its own part, such as the dy of an all-reduce,
has a gradient that is summed over ranks (`replicated`).
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
from overweave.ops.dispatch.fake import tell_counters
from overweave.ops.dispatch.route import place_of, told_of
from overweave.ops.dispatch.schema import DEFINED, request_of

Maybe = torch.Tensor | None


class Kept(NamedTuple):
    """What a call keeps for its gradients beside tensors.

    m: all rows of the product. save: what a gather keeps of x, `gathered`, `shard` or `columns`. plan: of the call,
    and of what gathers columns again; dual_plan: of the dual. counts, most: of an exchange.
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
    """Of each x and each w, None where nobody asked; and of the bias of one product."""

    xs: list[Maybe]
    ws: list[Maybe]
    bias: Maybe = None


class NeededGradients(NamedTuple):
    """Which gradients are wanted."""

    xs: list[bool]
    ws: list[bool]
    bias: bool = False


def gradients_of(kept: Kept, asked: NeededGradients, dys: list[Maybe], xs: list[Any], ws: list[Any]) -> Gradients:
    """dys: of the products; None where nothing reads one. xs: x, or what was kept of it, as `save` says. Collective."""
    if kept.operator.gathers and not kept.operator.exchanges:
        return _of_gather(kept, asked, dys, xs, ws)
    (dy,) = dys
    if dy is None:
        return Gradients([None for _ in xs], [None for _ in ws])
    if kept.operator.exchanges:
        return _of_exchange(kept, asked, dy, xs[0], ws[0])
    return (_of_scatter if kept.operator.scatters else _of_local)(kept, asked, dy, xs, ws)


def _of_gather(kept: Kept, asked: NeededGradients, dys: list[Maybe], xs: list[Any], ws: list[Any]) -> Gradients:
    used = [index for index, dy in enumerate(dys) if dy is not None]
    parts = [dys[index] for index in used]
    dx: Maybe = None
    dws: list[Maybe] = [None for _ in dys]
    bias = torch.cat([_column_sums(dy, w) for dy, w in zip(dys, ws, strict=True)]) if asked.bias else None
    if not used:
        return Gradients([None], dws, bias)
    if asked.xs[0]:
        (dx,) = _dual(kept, parts, [ws[index].t() for index in used])
    wanted = [index for index in used if asked.ws[index]]
    if wanted and kept.save == "columns":
        found = _call(kept.operator, kept, xs, [dys[index] for index in wanted], m=ws[0].shape[0], plan=kept.plan)
        dws = [found[wanted.index(index)] if index in wanted else None for index in range(len(dys))]
    elif wanted:
        rows = gathered(kept, xs[0]) if kept.save == "shard" else xs[0]
        dws = [_of_weight(rows, dys[index], ws[index]) if index in wanted else None for index in range(len(dys))]
    return Gradients([dx], dws, bias)


def _of_scatter(kept: Kept, asked: NeededGradients, dy: torch.Tensor, xs: list[Any], ws: list[Any]) -> Gradients:
    transposed = [w.t() for w, is_asked in zip(ws, asked.xs, strict=True) if is_asked]
    needs_rows, is_recorded = asked.bias or any(asked.ws), torch.is_grad_enabled()
    returns_rows = needs_rows and bool(transposed) and not is_recorded
    found = _dual(kept, [dy], transposed, m=kept.m, return_gathered=returns_rows) if transposed else []
    rows = found.pop() if returns_rows else gathered(kept, dy) if needs_rows else dy
    bias = None if not asked.bias else summed(kept, dy.sum(0)) if is_recorded else rows.sum(0)
    dxs = [found.pop(0) if is_asked else None for is_asked in asked.xs]
    dws = [_of_weight(x, rows, w) if is_asked else None for x, w, is_asked in zip(xs, ws, asked.ws, strict=True)]
    return Gradients(dxs, dws, bias)


def _of_local(kept: Kept, asked: NeededGradients, dy: torch.Tensor, xs: list[Any], ws: list[Any]) -> Gradients:
    rows = replicated(exchange_of(kept), dy)
    dxs = [rows @ w.t() if is_asked else None for w, is_asked in zip(ws, asked.xs, strict=True)]
    dws = [_of_weight(x, rows, w) if is_asked else None for x, w, is_asked in zip(xs, ws, asked.ws, strict=True)]
    return Gradients(dxs, dws, dy.sum(0) if asked.bias else None)


def _of_exchange(kept: Kept, asked: NeededGradients, dy: torch.Tensor, x: Any, w: Any) -> Gradients:
    """Blocks travel back by the counts transposed. Those of the product of a weight's gradient go by the library."""
    dx = dw = None
    back = None if kept.counts is None else transposed(kept.counts)
    if asked.xs[0]:
        (dx,) = _dual(kept, [dy], [w.t()], counts=back, most=kept.most)
    if asked.ws[0]:
        gathers = kept.operator.gathers
        rows = exchanged(kept, x, kept.counts) if gathers else x
        dw = _of_weight(rows, dy if gathers else exchanged(kept, dy, back), w)
    return Gradients([dx], [dw])


def _of_weight(x: torch.Tensor, dy: Any, w: torch.Tensor) -> Any:
    """In the memory layout of w, so that nothing copies it where it is added up."""
    return x.t() @ dy if w.is_contiguous() else (dy.t() @ x).t()


def _column_sums(dy: Maybe, w: torch.Tensor) -> torch.Tensor:
    return w.new_zeros(w.shape[1]) if dy is None else dy.sum(0)


def _dual(kept: Kept, xs: list[Any], ws: list[Any], **options: Any) -> list[torch.Tensor]:
    dual = kept.operator.dual
    assert dual
    return _call(record_of(dual), kept, xs, ws, plan=kept.dual_plan, **options)


def _call(operator: Operator, kept: Kept, xs: list[Any], ws: list[Any], **options: Any) -> list[torch.Tensor]:
    defined = DEFINED[operator.name]
    if is_watched():
        tell_counters()
        request = request_of(defined.names, kept.group_name, {"x": xs, "w": ws, **options})
        return list(defined.op(*request.tensors, **request.options, **told_of(place_of(kept.group_name))))
    x, w = (each if len(each) > 1 else each[0] for each in (xs, ws))
    return defined.eager(kept.group_name, {"x": x, "w": w, **options})


def exchange_of(kept: Kept) -> Exchange:
    """What ranks compare where a gradient that torch records goes by a collective."""
    return Exchange(place_of(kept.group_name), f"gradients of {kept.operator.name}")


def gathered(kept: Kept, rows: torch.Tensor) -> Any:
    """The rows of all ranks, `[m, cols]`, by the library: no product waits for them. Dealt as by torch.chunk."""
    if kept.world_size == 1:
        return rows
    if torch.is_grad_enabled():
        return all_gather_rows(exchange_of(kept), rows, kept.m)
    most = -(-kept.m // kept.world_size)
    padded = rows if kept.m % kept.world_size == 0 else torch.nn.functional.pad(rows, (0, 0, 0, most - rows.shape[0]))
    if is_watched():
        return _recorded("all_gather_into_tensor", padded.contiguous(), kept.world_size, kept.group_name)[: kept.m]
    # The functional collective would do; of tensors on a GPU that gloo gathers, it ends the process (torch 2.11).
    every = rows.new_empty((most * kept.world_size, *rows.shape[1:]))
    run_collective(group_of(kept.group_name), all_gather_single, every, padded.contiguous())
    return every[: kept.m]


def transposed(counts: Counts) -> list[list[int]]:
    """Counts of the same blocks on their way back."""
    return [list(column) for column in zip(*counts, strict=True)]


def exchanged(kept: Kept, rows: torch.Tensor, counts: Counts | None) -> torch.Tensor:
    """The blocks of rows that all ranks have for this one, one below the other, by the library."""
    even = [rows.shape[0] // kept.world_size] * kept.world_size
    sent, received = even, even
    if counts is not None:
        sent, received = list(counts[kept.rank]), [row[kept.rank] for row in counts]
    if torch.is_grad_enabled():
        moved: torch.Tensor = all_to_all_single_autograd(rows.contiguous(), received, sent, kept.group_name)
        return moved
    if is_watched():
        return _recorded("all_to_all_single", rows.contiguous(), received, sent, kept.group_name)
    every = rows.new_empty((sum(received), *rows.shape[1:]))
    sides = every, rows.contiguous(), received, sent
    run_collective(group_of(kept.group_name), dist.all_to_all_single, *sides)
    return every


def summed(kept: Kept, part: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of each one's part, fp32, by the library, of what no product waits for."""
    if kept.world_size == 1:
        return part
    if torch.is_grad_enabled():
        return all_reduce_rows(exchange_of(kept), part)
    if is_watched():
        return _recorded("all_reduce", part, "sum", kept.group_name)
    run_collective(group_of(kept.group_name), dist.all_reduce, part)
    return part


def _recorded(collective: str, *arguments: Any) -> torch.Tensor:
    """What a functional collective of torch returns, which tracers record."""
    every: torch.Tensor = c10d_functional.wait_tensor(getattr(c10d_functional, collective)(*arguments))
    return every


def added_to_shard(kept: Kept, dx: Maybe, d_gathered: torch.Tensor, is_alike: bool) -> torch.Tensor:
    """The gradient of a shard of whose gathered rows there is a gradient, too. is_alike: the same on all ranks, as that
    of rows that the call returned; else each rank has a part of it, as of rows that a gradient of a weight read."""
    exchange = exchange_of(kept)
    of_shard = own_rows(exchange, d_gathered) if is_alike else reduce_scatter_rows(exchange, d_gathered)
    return of_shard if dx is None else dx + of_shard


def norm_gradients(z: torch.Tensor, weight: torch.Tensor, eps: float, dy: torch.Tensor) -> tuple[Any, Any]:
    """Of the rows z, rounded once, and of the weight, fp32, where `y = z / sqrt(mean(z ** 2) + eps) * weight`."""
    z32, scaled = z.float(), dy.float() * weight.float()
    inverse = torch.rsqrt(z32.square().mean(1, keepdim=True) + eps)
    normed = z32 * inverse
    dz = inverse * (scaled - normed * (scaled * normed).mean(1, keepdim=True))
    return dz.to(z.dtype), (dy.float() * normed).sum(0)


def kept_of(operator: Operator, group_name: str, rows: Any, options: dict[str, Any]) -> Kept:
    """What to keep of a call on `rows` rows of x. Raises InputError for an unknown `save`."""
    place = place_of(group_name)
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
    return Kept(operator, group_name, world_size, place.rank, m, save, *plans, *exchange)
