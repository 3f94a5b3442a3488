"""`plan="push"` of dispatch and combine as ops of torch: tables from the router's choice, rows by kernel, gradients.

No host looks at a count: sizes follow from shapes and bounds, so that a CUDA graph may replay a call with others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from overweave.errors import InputError
from overweave.kernels.arguments import SentRows
from overweave.moe.overlapped import check_ids
from overweave.moe.routing import route
from overweave.moe.sending import RowsSender
from overweave.moe.travelling import Travelling, as_rows, as_words, dense, positions_of
from overweave.ops.call.groups import group_of
from overweave.ops.dispatch.collectives import WHERE, Exchange, agreed, described
from overweave.ops.dispatch.torch_ops import TorchOp, define
from overweave.runtime.sent_rows import Parts, Placed, Sending, SendSizes

MOST_SMS = 12
SUMMED = (torch.bfloat16, torch.float16, torch.float32)


class Push(NamedTuple):
    """How `plan="push"` sends. tokens: an upper bound of the rows of x of any rank, alike on all; None: all have as
    many as this one. sms: a kernel of so many SMs sends, which leaves the others to what computes meanwhile."""

    tokens: int | None = None
    sms: int = MOST_SMS


class SentTables(NamedTuple):
    """Which tokens a call sends where, int32, on the device. tokens `[t * top]`: their indices in the order in which
    they are sent, rank by rank. starts `[W + 1]`: where those for each rank begin. positions `[t, W]`: which of those
    for a rank a token is, -1 if none. received `[W + 2]`: where the rows of each source begin, the last one's end, and
    a reason."""

    tokens: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor
    received: torch.Tensor


class PushedRoute(NamedTuple):
    """What `combine` needs of a dispatch. anchor: by which the gradients of `combine` reach those of `dispatch` on
    every rank."""

    exchange: Exchange
    push: Push
    tables: SentTables
    anchor: torch.Tensor

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the ops."""
        return _bounds(self.exchange, self.push)


class Pushed(NamedTuple):
    """What a rank has received, as `Dispatched` says. weights, scales: without columns if none were passed."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    row_scales: torch.Tensor


def check_push(push: Push, tokens: int, most: int | None) -> Push:
    """Return push with its bound of tokens. Raises InputError."""
    if most is None:
        raise InputError('dispatch with plan "push"', "nobody says how many rows a rank may receive", "Pass most=")
    bound, sms = push
    if type(sms) is not int or not 1 <= sms <= 1024:
        raise InputError("push by kernel", f"sms={str(sms)[:40]}", "Pass the SMs that send, an int of at least 1")
    if bound is not None and (type(bound) is not int or bound < tokens):
        found = f"tokens={str(bound)[:40]}, this rank has {tokens}"
        raise InputError("push within a bound", found, "Pass an upper bound of any rank's tokens, alike on all ranks")
    return Push(tokens if bound is None else bound, sms)


def check_summed(name: str, x: torch.Tensor) -> None:
    """Raise InputError for a dtype whose sums kernels do not add."""
    if x.dtype not in SUMMED:
        cure = f"Pass {', '.join(str(each).removeprefix('torch.') for each in SUMMED)}, or plan=None"
        raise InputError(f'{name} with plan "push"', f"parts are {x.dtype}", cure)


def dispatched(
    exchange: Exchange, push: Push, given: Travelling, bounds: tuple[int, int]
) -> tuple[Pushed, PushedRoute]:
    """Send tokens to the ranks of their experts. bounds: experts of all ranks, and `most`."""
    experts, most = bounds
    options = _bounds(exchange, push) | {"experts": experts, "most": most}
    *received, anchor, tokens, starts, positions, begins = torch.ops.overweave.dispatch_pushed(*given, **options)
    return Pushed(*received), PushedRoute(exchange, push, SentTables(tokens, starts, positions, begins), anchor)


def combined(parts: torch.Tensor, route: PushedRoute) -> torch.Tensor:
    """Return the sums of this rank's tokens: parts are sent back to the owners, who add them."""
    y: torch.Tensor = torch.ops.overweave.combine_pushed(parts, route.anchor, *route.tables, **route.options)
    return y


def _bounds(exchange: Exchange, push: Push) -> dict[str, Any]:
    return exchange.options | {"shard": push.tokens, "sms": push.sms}


def _agree(options: dict[str, Any], moved: str) -> None:
    """Compare a call on all ranks: in words, so that those whose bounds differ are told which."""
    told = f"{options['told']}: {moved}, at most {options['shard']} of a rank"
    agreed(options["group_name"], told, lambda group: None)


def _landed(
    matrices: tuple[torch.Tensor, torch.Tensor | None], tables: SentTables, counts: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send rows; return those that this rank received, and their metadata, as words. matrices: int32, what may be sent.
    Fills `tables.received`."""
    rows, metadata = matrices
    group, most = group_of(options["group_name"]), options["most"]
    size = SendSizes(
        max(options["shard"], 1), most, rows.shape[1], 0 if metadata is None else metadata.shape[1], options["sms"]
    )
    out = rows.new_empty((most, rows.shape[1]))
    out_metadata = None if metadata is None else rows.new_empty((most, metadata.shape[1]))
    sending = Sending(SentRows(rows, metadata, tables.tokens, tables.starts), counts)
    RowsSender(group, size).land(sending, Placed(out, out_metadata, tables.received))
    return out, out if out_metadata is None else out_metadata


def _dispatch(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    topk_ids: torch.Tensor,
    *,
    experts: int,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    check_ids(options["group_name"], topk_ids, experts)
    _agree(options, described("rows", x))
    given = Travelling(x, scales, topk_weights, topk_ids)
    targets, metadata = given.targets_and_metadata(experts, options["place"][1])
    routed = route(targets, options["place"][1])  # ranks are routed to as experts are
    positions, counts = positions_of(targets, routed)
    tokens, starts = routed.tokens.clone(), routed.offsets.clone()  # results of an op lie each in memory of their own
    tables = SentTables(tokens, starts, positions, counts.new_empty(len(counts) + 1))
    words, metadata = _landed((as_words(x), metadata), tables, counts, **options)
    return as_rows(words, x), *given.read(metadata, experts, options["place"]), _anchor(x), *tables


def _anchor(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((0,), dtype=torch.float32)


def _send(rows: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, **options: Any) -> torch.Tensor:
    """Send rows as `_dispatch` sent tokens."""
    _agree(options, described("rows", rows))
    received = starts.new_empty(starts.shape[0] + 1)
    tables = SentTables(tokens, starts, tokens, received)
    counts = torch.cat([starts[1:] - starts[:-1], starts.new_zeros(1)])
    words, _ = _landed((as_words(rows), None), tables, counts, **options)
    return as_rows(words, rows)


def _combine(
    parts: torch.Tensor,
    anchor: torch.Tensor | None,
    tokens: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    received: torch.Tensor,
    *,
    shard: int,
    sms: int,
    group_name: str,
    told: str,
    place: list[int],
) -> torch.Tensor:
    _agree({"group_name": group_name, "told": told, "shard": shard}, described("parts", parts))
    words = as_words(parts)
    size = SendSizes(max(shard, 1), parts.shape[0], words.shape[1], 0, sms)
    padded = words.view(parts.dtype)
    y = padded.new_empty((positions.shape[0], padded.shape[1]))
    sending = Sending(SentRows(words, None, None, received[:-1]), None)
    RowsSender(group_of(group_name), size).add(sending, Parts(padded, positions, received), y)
    return y if y.shape[1] == parts.shape[1] else y[:, : parts.shape[1]].contiguous()


def _dispatch_fake(
    x: torch.Tensor, scales: torch.Tensor | None, topk_weights: torch.Tensor | None, topk_ids: torch.Tensor, **o: Any
) -> tuple[torch.Tensor, ...]:
    (t, top), most, ranks = topk_ids.shape, o["most"], o["place"][1]

    def ints(*shape: int) -> torch.Tensor:
        return topk_ids.new_empty(shape, dtype=torch.int32)

    def floats(like: torch.Tensor | None) -> torch.Tensor:
        return x.new_empty((most, 0 if like is None else like.shape[1]), dtype=torch.float32)

    rows = x.new_empty((most, x.shape[1])), ints(most, top), floats(topk_weights), floats(scales), _anchor(x)
    return *rows, ints(t * top), ints(ranks + 1), ints(t, ranks), ints(ranks + 2)


def _send_fake(rows: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, **options: Any) -> torch.Tensor:
    return rows.new_empty((options["most"], rows.shape[1]))


def _combine_fake(
    parts: torch.Tensor, anchor: Any, tokens: Any, starts: Any, positions: torch.Tensor, *_: Any, **options: Any
) -> torch.Tensor:
    return parts.new_empty((positions.shape[0], parts.shape[1]))


def _of_gradients(options: dict[str, Any]) -> dict[str, Any]:
    told = str(options["told"]).removeprefix("gradients of ")
    names = ("group_name", "place", "shard", "sms")
    return {name: options[name] for name in names} | {"told": f"gradients of {told}"}


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    _, _, weights, _ = inputs
    _, ids, _, scales, _, *tables = output
    ctx.save_for_backward(ids, *tables)
    ctx.mark_non_differentiable(ids, scales, *tables)
    ctx.weights_dtype, ctx.options = None if weights is None else weights.dtype, _of_gradients(keyword_only_inputs)


def _dispatch_gradient(ctx: Any, dx: Any, _: Any, dweights: Any, *__: Any) -> tuple[Any, ...]:
    """Exchange gradients in one order on all ranks."""
    ids, *tables = ctx.saved_tensors
    found: list[Any] = [None, None]
    if ctx.needs_input_grad[0]:
        found[0] = torch.ops.overweave.combine_pushed(dense(dx), None, *tables, **ctx.options)
    if ctx.needs_input_grad[2]:
        own = torch.where(ids >= 0, dweights, 0.0)
        found[1] = torch.ops.overweave.combine_pushed(own, None, *tables, **ctx.options).to(ctx.weights_dtype)
    return found[0], None, found[1], None


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    parts, anchor, tokens, starts, _, _ = inputs
    ctx.save_for_backward(tokens, starts, *([] if anchor is None else [anchor]))
    ctx.most, ctx.options = parts.shape[0], _of_gradients(keyword_only_inputs)


def _combine_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    tokens, starts, *anchor = ctx.saved_tensors
    rows = torch.ops.overweave.send_pushed(dense(gradient), tokens, starts, most=ctx.most, **ctx.options)
    return rows, torch.zeros_like(anchor[0]) if anchor else None, None, None, None, None


_BOUNDS = f"SymInt shard, int sms, {WHERE}"
_DISPATCH = (
    "(Tensor x, Tensor? scales, Tensor? topk_weights, Tensor topk_ids, *, int experts, SymInt most, "
    f"{_BOUNDS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_SEND = f"(Tensor rows, Tensor tokens, Tensor starts, *, SymInt most, {_BOUNDS}) -> Tensor"
_COMBINE = (
    "(Tensor parts, Tensor? anchor, Tensor tokens, Tensor starts, Tensor positions, Tensor received, *, "
    f"{_BOUNDS}) -> Tensor"
)
for _op in (
    TorchOp("dispatch_pushed", _DISPATCH, _dispatch, _dispatch_fake, _dispatch_gradient, _keep_dispatch),
    TorchOp("send_pushed", _SEND, _send, _send_fake),
    TorchOp("combine_pushed", _COMBINE, _combine, _combine_fake, _combine_gradient, _keep_combine),
):
    define(_op)
