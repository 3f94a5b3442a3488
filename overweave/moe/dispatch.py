"""Expert parallel: a token travels once to each rank that holds an expert of its, and what comes of it travels back.

    sent = dispatch(x, topk_ids, topk_weights, experts)   # [t, k] -> rows [r, k] for the experts of this rank
    y = combine(parts, sent)                              # [r, n] -> [t, n]

`sequential`: an uneven all-to-all of the library moves the rows, so that the host of every rank looks at the counts of
a call. `push`: kernels store them on peers, and no host looks (pushed.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from overweave.compat.torch_names import all_gather_single
from overweave.errors import InputError
from overweave.memory.group import Group, GroupLike
from overweave.moe.checks import check_routing, check_rows
from overweave.moe.pushed import Push, PushedRoute, check_push, check_summed, combined, dispatched
from overweave.moe.travelling import Travelling
from overweave.ops.call.collective import run_collective
from overweave.ops.call.groups import group_of, refuse
from overweave.ops.dispatch.collectives import WHERE, Exchange, agreed, described, exchange_in
from overweave.ops.dispatch.route import refusing
from overweave.ops.dispatch.torch_ops import TorchOp, define
from overweave.runtime.library.library import as_movable

ABSENT = -1  # the id of no expert
PLANS: dict[str, Push | None] = {"sequential": None, "push": Push()}  # None: by the library
RowsAndScales = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # rows, or rows in fp8 and their scales


class Route(NamedTuple):
    """Which tokens a call sends where. sent: int64, tokens in the order in which they are sent, rank by rank, within
    a rank ascending; -1 behind the last. counts: int64 `[W, W]` on the CPU, tokens by source and target. anchor: by
    which the gradients of `combine` reach those of `dispatch` on every rank, whatever a rank does in between."""

    exchange: Exchange
    sent: torch.Tensor
    counts: torch.Tensor
    anchor: torch.Tensor
    tokens: int


class Dispatched(NamedTuple):
    """What a rank has received, source by source, each source's tokens in their order.

    x: `[r, k]`. topk_ids: int32 `[r, top]`, numbered from the rank's first expert; -1 for experts of other ranks and in
    rows that nobody sent. topk_weights: fp32 `[r, top]`, 0 there; None if none were passed. route: the way back.
    scales: fp32 `[r, s]`, of rows in fp8; None if none were passed.
    """

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    route: Route | PushedRoute
    scales: torch.Tensor | None = None

    @property
    def reason(self) -> torch.Tensor | None:
        """Why a call with plan "push" is void: int32, a word on the device. 0: it is not. 2: the router's tables were
        late on some rank (moe/routing). 4: some rank would receive more than `most` rows. None: the library's way."""
        return self.route.tables.received[-1] if isinstance(self.route, PushedRoute) else None


def dispatch(
    x: RowsAndScales,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    experts: int,
    group: GroupLike = None,
    *,
    most: int | None = None,
    plan: str | Push | None = None,
) -> Dispatched:
    """Sends each token once to every rank that holds one of its experts.

    Plain torch:  ranks = topk_ids // ceil(experts / W); x of the tokens with any(ranks == r, 1), by all_to_all_single

    x: `[t, k]`, of any dtype, t of each rank's own. Or, as DeepEP takes them, a pair: rows in fp8, and their scales
    fp32 `[t, s]`, such as one for 128 elements, which travel with them. topk_ids: int32 or int64 `[t, top]`, experts of
    all ranks; -1 is no expert: nothing is sent for it. topk_weights: floats `[t, top]`, which travel in fp32, or None.
    experts: of all ranks; rank r holds those that torch.chunk gives it, the last ranks fewer or none.
    most: an upper bound of the rows that any rank receives. Then results have `most` rows, those behind the received
    ones zeros and without experts; None: as many as arrived. torch.compile(fullgraph=True) needs it.

    plan: `sequential`, by the library: the counts are gathered first, and every rank's host reads them: a call
    synchronises, and no graph captures it. `push`, or `Push(tokens=, sms=)`, with `most`: a kernel stores counts and
    rows on peers, without a look of the host: each rank waits for the counts of all, then for the rows of each in turn,
    and a graph may replay the call with other experts. All ranks have t rows then, or say `tokens=`, a bound. More rows
    than `most` on any rank make the results of all ranks void: NaN, without experts, as `reason` says. None: the first.

    Gradients: those of x by the way back, summed in fp32 in the order of ranks; those of topk_weights from the rank
    that holds the expert.

    Raises InputError on all ranks for arguments it cannot take and, but for `push`, for more rows than `most`;
    RankMismatch if ranks differ, PeerError for a peer that died or stalled.
    """
    with refusing(group):
        x, scales = _rows_and_scales(x)
        check_routing("dispatch", x.shape[0], topk_ids, topk_weights)
        _check_experts(experts, most)
        push = _chosen(plan)
        if push is not None:
            push = check_push(push, x.shape[0], most)
            check_summed("gradients of dispatch", x) if torch.is_grad_enabled() and x.requires_grad else None
        exchange = exchange_in(group, _told(Travelling(x, scales, topk_weights, topk_ids), (experts, most), push))
    if push is not None and most is not None:
        sent = Travelling(x, scales, topk_weights, topk_ids)
        got, way = dispatched(exchange, push, sent, (experts, most))
        weights, of_rows = (
            None if passed is None else each for passed, each in ((topk_weights, got.weights), (scales, got.row_scales))
        )
        return Dispatched(got.x, got.ids, weights, way, of_rows)
    bounds, given = exchange.options | {"most": most}, {"experts": experts}
    order, counts = torch.ops.overweave.dispatch_route(topk_ids, **given, **bounds)
    received, ids, weights, of_rows, anchor = torch.ops.overweave.dispatch_tokens(
        x, scales, topk_weights, topk_ids, order, counts, **given, **bounds
    )
    route = Route(exchange, order, counts, anchor, x.shape[0])
    return Dispatched(
        received, ids, None if topk_weights is None else weights, route, None if scales is None else of_rows
    )


def combine(parts: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
    """y[token] = sum over the ranks that the token was sent to of its row of their parts.

    Plain torch:  y.index_add_(0, tokens sent to a rank, rows that come back from it), rank by rank, in fp32

    parts: `[r, n]`, of what `dispatch` returned on this rank, in its order: the weighted sum over the rank's own
    experts; of a call by `push` in bf16, fp16 or fp32. Returns `[t, n]` in the dtype of parts: added in fp32 in the
    order of ranks, rounded once; a token that was sent nowhere is 0. Of parts only the rows that were received are
    read. They go back as tokens came, by the same plan; of a void call all sums are NaN.

    Gradients: rows travel as in `dispatch`. Raises as `dispatch`.
    """
    given: object = dispatched
    if not isinstance(given, Dispatched):
        found = f"got {type(given).__name__}"
        raise InputError("combine: dispatched, what dispatch returned", found, "Pass what brought the tokens here")
    route = dispatched.route
    with refusing(route.exchange.place.name):
        check_rows("combine", parts, "parts")
        if parts.shape[0] != dispatched.x.shape[0]:
            found = f"got {parts.shape[0]} rows"
            raise InputError(
                f"combine: parts of {dispatched.x.shape[0]} rows", found, "Pass a row for each received one"
            )
        if isinstance(route, PushedRoute):
            check_summed("combine", parts)
    if isinstance(route, PushedRoute):
        return combined(parts, route)
    options = route.exchange.options | {"tokens": route.tokens}
    y: torch.Tensor = torch.ops.overweave.combine_rows(parts, route.anchor, route.sent, route.counts, **options)
    return y


def _rows_and_scales(x: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Raises InputError."""
    if not isinstance(x, tuple | list):
        check_rows("dispatch", x)
        assert isinstance(x, torch.Tensor)
        return x, None
    if len(x) != 2:
        raise InputError("dispatch: rows in fp8 and their scales", f"got {len(x)} tensors", "Pass a pair of them")
    rows, scales = x
    check_rows("dispatch", rows)
    check_rows("dispatch", scales, "scales of x")
    if rows.element_size() != 1 or scales.dtype != torch.float32 or scales.shape[0] != rows.shape[0]:
        found = f"got {scales.dtype} {list(scales.shape)} beside {rows.dtype} {list(rows.shape)}"
        raise InputError("dispatch: rows in fp8 and their scales", found, "Pass fp8 [t, k] and fp32 [t, s]")
    return rows, scales


def _chosen(plan: object) -> Push | None:
    """Return how `push` sends; None: the library sends. Raises InputError."""
    if plan is None or isinstance(plan, Push):
        return plan
    if not isinstance(plan, str) or plan not in PLANS:
        cure = f"Use {', '.join(PLANS)}, or moe.Push(tokens=, sms=)"
        raise InputError(f"dispatch with plan {str(plan)[:40]!r}", "there is no such plan", cure)
    return PLANS[plan]


def _told(sent: Travelling, bounds: tuple[int, int | None], push: Push | None) -> str:
    """Return a description of the call, which all ranks compare: they will compute gradients together."""
    (experts, most), weights = bounds, sent.weights
    differentiated = {"x": sent.x, "topk_weights": weights} if torch.is_grad_enabled() else {}
    names = [name for name, each in differentiated.items() if each is not None and each.requires_grad]
    of_gradients = f" with gradients of {' '.join(names)}" if names else ""
    metadata = "" if weights is None else " with topk_weights"
    metadata += "" if sent.row_scales is None else f" with {sent.row_scales.shape[1]} scales"
    bound = None if most is None else int(most)
    by = "" if push is None else f" by push of {push.tokens} tokens on {push.sms} SMs"
    return f"dispatch to {int(experts)} experts, top {sent.ids.shape[1]}, most {bound}{metadata}{by}{of_gradients}"


def _check_experts(experts: int, most: int | None) -> None:
    if type(experts) is not int or experts < 1:
        found = f"got {str(experts)[:40]}"
        raise InputError("dispatch: experts, of all ranks", found, "Pass an int of at least 1, alike on all ranks")
    if most is not None and (type(most) is not int or most < 0):
        cure = "Pass an int, alike on all ranks, or None"
        raise InputError("dispatch: most, an upper bound of received rows", f"got {str(most)[:40]}", cure)


def _route(
    topk_ids: torch.Tensor, *, experts: int, most: int | None, group_name: str, told: str, place: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order in which tokens are sent, and the counts of all ranks on the CPU."""
    ranks, tokens = place[1], topk_ids.shape[0]
    is_some = (topk_ids >= 0) & (topk_ids < experts)
    if not topk_ids.is_cuda and bool((~is_some & (topk_ids != ABSENT)).any()):
        found, cure = f"they are {int(topk_ids.min())} to {int(topk_ids.max())}", "Pass experts, or -1 for none"
        raise refuse(group_of(group_name), InputError(f"dispatch: topk_ids below {experts}", found, cure))
    targets = torch.where(is_some, topk_ids // -(-experts // ranks), ranks)
    goes = (targets.unsqueeze(0) == torch.arange(ranks, device=topk_ids.device).view(-1, 1, 1)).any(2)  # [W, t]
    to = goes.sum(1)

    def move(group: Group) -> torch.Tensor:
        every = to.new_empty(ranks * ranks)
        if ranks > 1:
            run_collective(group, all_gather_single, every, to)
        return every.view(ranks, ranks) if ranks > 1 else to.view(1, 1)

    counts = agreed(group_name, f"{told}: counts", move).cpu()
    received = int(counts.sum(0).max())
    if most is not None and received > most:  # alike on all ranks, who have the same counts
        found = f"rank {int(counts.sum(0).argmax())} receives {received}"
        raise InputError(f"dispatch: at most {most} rows for a rank", found, "Pass a larger bound, or None")
    order = (~goes).flatten().to(torch.uint8).argsort(stable=True)  # those that go, rank by rank
    behind = torch.arange(order.numel(), device=order.device) >= to.sum()
    return torch.where(behind, ABSENT, order % max(tokens, 1)), counts


def _tokens(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    topk_ids: torch.Tensor,
    sent: torch.Tensor,
    counts: torch.Tensor,
    *,
    experts: int,
    most: int | None,
    **where: Any,
) -> tuple[torch.Tensor, ...]:
    """Return the rows that this rank receives, with their experts, weights and scales, sent as words of 32 bits."""
    given = Travelling(x, scales, topk_weights, topk_ids)
    x, metadata = _sent([x, given.metadata()], sent, counts, most, **where)
    return x, *given.read(metadata, experts, where["place"]), _anchor(x)


def _anchor(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((0,), dtype=torch.float32)


def _sent(
    matrices: list[torch.Tensor],
    sent: torch.Tensor,
    counts: torch.Tensor,
    most: int | None,
    *,
    group_name: str,
    told: str,
    place: list[int],
) -> list[torch.Tensor]:
    """Send rows of each matrix to the ranks that `sent` and `counts` name; return those received, zeros behind them."""
    to, source = counts[place[0]].tolist(), counts[:, place[0]].tolist()
    rows = sum(source) if most is None else most
    received = [each.new_zeros((rows, *each.shape[1:])) for each in matrices]
    mine = [each.index_select(0, sent[: sum(to)]) for each in map(as_movable, matrices)]

    def move(group: Group) -> list[torch.Tensor]:
        for own, target in zip(mine, received, strict=True):
            if counts.any() and own.shape[1]:
                landing = as_movable(target)[: sum(source)]
                run_collective(group, dist.all_to_all_single, landing, own, source, to)
        return received

    return agreed(group_name, f"{told}: {' and '.join(described('rows', each) for each in matrices)}", move)


def _send(rows: torch.Tensor, sent: torch.Tensor, counts: torch.Tensor, *, most: int | None, **where: Any) -> Any:
    return _sent([rows], sent, counts, most, **where)[0]


def _send_back(
    parts: torch.Tensor,
    anchor: torch.Tensor | None,
    sent: torch.Tensor,
    counts: torch.Tensor,
    *,
    tokens: int,
    group_name: str,
    told: str,
    place: list[int],
) -> torch.Tensor:
    to, source = counts[place[0]].tolist(), counts[:, place[0]].tolist()
    returned = parts.new_empty((sum(to), *parts.shape[1:]))

    def move(group: Group) -> torch.Tensor:
        if counts.any() and parts.shape[1]:
            mine = parts[: sum(source)].contiguous()
            run_collective(group, dist.all_to_all_single, returned, mine, to, source)
        return returned

    agreed(group_name, f"{told}: {described('parts', parts)}", move)
    total = parts.new_zeros((tokens, *parts.shape[1:]), dtype=torch.float32)
    for tokens_of, part in zip(sent[: sum(to)].split(to), returned.split(to), strict=True):
        total.index_add_(0, tokens_of, part.float())  # a token is there once: the order is that of ranks
    return total.to(parts.dtype)


def _route_fake(topk_ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = options["place"][1]
    sent = topk_ids.new_empty((ranks * topk_ids.shape[0],), dtype=torch.int64)
    return sent, torch.empty((ranks, ranks), dtype=torch.int64, device="cpu")


def _rows_of(most: int | None) -> Any:
    return torch.library.get_ctx().new_dynamic_size() if most is None else most


def _tokens_fake(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    topk_ids: torch.Tensor,
    *_: Any,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    rows, top = _rows_of(options["most"]), topk_ids.shape[1]
    widths = (0 if each is None else each.shape[1] for each in (topk_weights, scales))
    floats = (x.new_empty((rows, width), dtype=torch.float32) for width in widths)
    return x.new_empty((rows, *x.shape[1:])), topk_ids.new_empty((rows, top), dtype=torch.int32), *floats, _anchor(x)


def _send_fake(rows: torch.Tensor, sent: torch.Tensor, counts: torch.Tensor, **options: Any) -> torch.Tensor:
    return rows.new_empty((_rows_of(options["most"]), *rows.shape[1:]))


def _send_back_fake(parts: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
    return parts.new_empty((options["tokens"], *parts.shape[1:]))


def _of_gradients(options: dict[str, Any]) -> dict[str, Any]:
    told = str(options["told"]).removeprefix("gradients of ")
    return {name: options[name] for name in ("group_name", "place")} | {"told": f"gradients of {told}"}


def _keep_tokens(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    x, _, weights, _, sent, counts = inputs
    ctx.save_for_backward(sent, counts, output[1])
    ctx.mark_non_differentiable(output[1], output[3])
    ctx.tokens, ctx.dtypes = x.shape[0], (x.dtype, None if weights is None else weights.dtype)
    ctx.options = _of_gradients(keyword_only_inputs)


def _tokens_gradient(ctx: Any, dx: Any, _: Any, dweights: Any, *__: Any) -> tuple[Any, ...]:
    """Exchange gradients in one order on all ranks."""
    sent, counts, ids = ctx.saved_tensors
    found: list[Any] = [None, None]
    if ctx.needs_input_grad[0]:
        found[0] = _combined(ctx, dx, sent, counts)
    if ctx.needs_input_grad[2]:
        own = torch.where(ids >= 0, dweights, 0.0)
        found[1] = _combined(ctx, own, sent, counts).to(ctx.dtypes[1])
    return found[0], None, found[1], None, None, None


def _combined(ctx: Any, parts: torch.Tensor, sent: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    options = ctx.options | {"tokens": ctx.tokens}
    combined: torch.Tensor = torch.ops.overweave.combine_rows(parts.contiguous(), None, sent, counts, **options)
    return combined


def _keep_parts(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    parts, anchor, sent, counts = inputs
    ctx.save_for_backward(sent, counts, *([] if anchor is None else [anchor]))
    ctx.rows, ctx.options = parts.shape[0], _of_gradients(keyword_only_inputs)


def _parts_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    sent, counts, *anchor = ctx.saved_tensors
    rows = torch.ops.overweave.dispatch_rows(gradient.contiguous(), sent, counts, most=ctx.rows, **ctx.options)
    return rows, torch.zeros_like(anchor[0]) if anchor else None, None, None


_COUNTED = "Tensor sent, Tensor counts"
_ROUTE = f"(Tensor topk_ids, *, int experts, int? most, {WHERE}) -> (Tensor, Tensor)"
_TOKENS = (
    f"(Tensor x, Tensor? scales, Tensor? topk_weights, Tensor topk_ids, {_COUNTED}, *, int experts, SymInt? most, "
    f"{WHERE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_ROWS = f"(Tensor rows, {_COUNTED}, *, SymInt? most, {WHERE}) -> Tensor"
_PARTS = f"(Tensor parts, Tensor? anchor, {_COUNTED}, *, SymInt tokens, {WHERE}) -> Tensor"
for _op in (
    TorchOp("dispatch_route", _ROUTE, _route, _route_fake),
    TorchOp("dispatch_tokens", _TOKENS, _tokens, _tokens_fake, _tokens_gradient, _keep_tokens),
    TorchOp("dispatch_rows", _ROWS, _send, _send_fake),
    TorchOp("combine_rows", _PARTS, _send_back, _send_back_fake, _parts_gradient, _keep_parts),
):
    define(_op)
