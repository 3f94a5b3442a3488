"""Experts whose every weight is split over ranks: rows are gathered before the first matmul, summed behind the second.

h, routed = all_gather_experts(x_shard, topk_ids, gate_up, group, glu=Glu())      # [t/W, k] -> [t * top, n/W]
y = experts_reduce_scatter(h, routed, topk_weights, down, group)                    # -> [t/W, k]

h, routed = experts_matmul(x, topk_ids, gate_up, glu=Glu())                       # of x that every rank has
y = experts_all_reduce(h, routed, topk_weights, down, group)                        # [t, k], alike on every rank

    y = experts_mlp(x_shard, topk_ids, topk_weights, ExpertWeights(gate_up, down, glu=Glu()), group)     # the first two
"""

from __future__ import annotations

import torch

from overweave.errors import InputError
from overweave.ir.shards import shard_rows
from overweave.memory.group import GroupLike
from overweave.moe.fp8 import FP8
from overweave.moe.glu import Glu, gated
from overweave.moe.overlapped import (
    ExpertWeights,
    check_layer,
    choose,
    glu_word,
    obstacle,
    pushing_is_quicker,
)
from overweave.moe.pairs import (
    RoutedTokens,
    TokensExperts,
    added,
    check_down,
    check_first,
    check_second,
    multiplied,
    routed_tokens,
    with_bias,
)
from overweave.moe.routing import as_ids
from overweave.moe.whole_experts import check_whole
from overweave.ops.dispatch.collectives import (
    Exchange,
    all_gather_rows,
    all_reduce_rows,
    exchange_in,
    reduce_scatter_rows,
    replicated,
)
from overweave.ops.dispatch.route import GroupRank, group_rank_of, refusing
from overweave.schedules.records.experts import NOT_MEASURED, PUSH


def all_gather_experts(
    x_shard: torch.Tensor,
    topk_ids: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    bias: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    glu: Glu | None = None,
    topk_weights: torch.Tensor | None = None,
    m: int | None = None,
    plan: str | None = None,
) -> tuple[torch.Tensor, RoutedTokens]:
    """h = all tokens of all ranks times their experts' weights, sorted by expert; and which row is whose.

    Plain torch:  experts_matmul(all_gather(x_shard), all_gather(topk_ids), w, bias=bias, glu=glu)

    x_shard: `[t/W, k]`, this rank's tokens. topk_ids: `[t/W, top]`, the experts of these. w: `[experts, n, k]`, this
    rank's n of each expert. bias: `[experts, n]`. scale_w: of w in fp8. glu: of w that packs two weights. topk_weights:
    `[t/W, top]`, on the input. m: t, where W does not divide it: ranks hold the parts of torch.chunk. All as in
    `experts_matmul`, as are the results: h `[t * top, n]` and the experts of all t tokens. plan: `sequential`, or
    `push`, whose tiles multiply what is there while other tokens travel, of rows of whole words of 16 bytes, without
    weights on the input or in fp8; None: the second of many tokens on GPUs that reach each other's memory, where nobody
    asks for gradients, else the first.

    Gradients: of x_shard, w, bias and topk_weights; the first and the last are summed and scattered.

    Raises InputError on all ranks for arguments it cannot take, RankMismatch if ranks differ, PeerError for a peer that
    died or stalled. Source: TileLink, section 5.
    """
    name = "all_gather_experts"
    with refusing(group):
        check_first(name, x_shard, topk_ids, topk_weights, ((w, bias, scale_w), glu))
        place = group_rank_of(group)
        tokens = _all_tokens(name, place, x_shard.shape[0], m)
        exchange = exchange_in(group, _told(name, topk_ids, w, {"x": x_shard, "topk_weights": topk_weights}, glu))
        reason = _reason(x_shard, w) or ("weights stand on the input" if topk_weights is not None else "")
        is_kept = _is_differentiated(x_shard, w, bias)
        chosen_plan = choose(name, plan, reason, not is_kept and _is_quicker(place, x_shard, tokens, x_shard.shape[1]))
    if chosen_plan == PUSH and place.world_size > 1:
        options = exchange.options | {"m": tokens, "keeps": is_kept and w.requires_grad}
        options["glu"] = "" if is_kept else glu_word(glu)
        ids = as_ids(topk_ids)
        h, every, _ = torch.ops.overweave.gathered_experts(x_shard, ids, w, bias, **options)
        return h if glu is None or not is_kept else gated(h, glu), routed_tokens(every, w.shape[0])
    ids, weights = _all_slots(exchange, topk_ids, topk_weights, tokens)
    x = all_gather_rows(exchange, x_shard, tokens)
    with refusing(group):
        routed = routed_tokens(ids, w.shape[0])
    return multiplied(x, routed, weights, (w, bias, scale_w), glu), routed


def experts_reduce_scatter(
    h: torch.Tensor,
    topk_ids: TokensExperts,
    topk_weights: torch.Tensor | None,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    bias: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    m: int | None = None,
    plan: str | None = None,
) -> torch.Tensor:
    """y = this rank's tokens of the sum over ranks: each token's `top` products, weighed and added in order.

    Plain torch:  reduce_scatter(experts_sum(h, all_gather(topk_ids), all_gather(topk_weights), w)), then the biases

    h: `[t * top, k]`, sorted by expert as `all_gather_experts` returns it; k is this rank's part of the reduced axis.
    topk_ids: what came with h, or `[t/W, top]` of this rank's tokens, which are gathered. topk_weights: `[t/W, top]`,
    or None. w: `[experts, n, k]`. bias: `[experts, n]`, alike on every rank, added once by the owner of a token.
    scale_w: of w in fp8. m: t, where W does not divide it. Returns `[t/W, n]`: the `top` of a token are added as in
    `experts_sum` and rounded to what travels; the library sums over ranks. plan: `sequential`, or `push`, which sends
    columns of sums to their owners while it computes the next ones, and adds those of all ranks in fp32, in their
    order; None: as there.

    Gradients: of h, w, bias and topk_weights, the latter two summed over ranks. Raises as `all_gather_experts`.
    """
    name = "experts_reduce_scatter"
    with refusing(group):
        place = group_rank_of(group)
        ids = topk_ids.topk_ids if isinstance(topk_ids, RoutedTokens) else topk_ids
        if isinstance(topk_ids, RoutedTokens):
            tokens = ids.shape[0]
            low, high = shard_rows(tokens, place.world_size, place.rank)
            ids = ids[low:high]
        else:
            own = ids.shape[0] if isinstance(ids, torch.Tensor) and ids.dim() else 0
            tokens = _all_tokens(name, place, own, m)
        check_second(name, h, ids, topk_weights, (w, bias, scale_w), tokens)
        exchange = exchange_in(group, _told(name, ids, w, {"h": h, "topk_weights": topk_weights, "bias": bias}))
        is_quicker = not _is_differentiated(h, w, bias, topk_weights) and _is_quicker(place, h, tokens, w.shape[1])
        chosen_plan = choose(name, plan, _reason(h, w), is_quicker)
    if isinstance(topk_ids, RoutedTokens):
        routed = topk_ids
        weights = None if topk_weights is None else all_gather_rows(exchange, topk_weights.float(), tokens)
    else:
        every, weights = _all_slots(exchange, ids, topk_weights, tokens)
        with refusing(group):
            routed = routed_tokens(every, w.shape[0])
    if chosen_plan == PUSH and place.world_size > 1:
        y = torch.ops.overweave.scattered_experts(h, routed.topk_ids, weights, w, **exchange.options)
    else:
        y = reduce_scatter_rows(exchange, added(h, routed, weights, (w, None, scale_w)))
    return y if bias is None else with_bias(y, (ids, topk_weights), replicated(exchange, bias))


def experts_mlp(
    x_shard: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    weights: ExpertWeights,
    group: GroupLike = None,
    *,
    m: int | None = None,
    plan: str | None = None,
) -> torch.Tensor:
    """y = this rank's tokens of a layer of experts: both matmuls, and what is between.

    Plain torch:  h, routed = all_gather_experts(x_shard, topk_ids, up, bias=up_bias, glu=glu)
                  y = experts_reduce_scatter(h, routed, topk_weights, down, bias=down_bias)

    x_shard: `[t/W, k]`. topk_ids, topk_weights: `[t/W, top]`. weights: this rank's part of all experts, or, with
    `first`, the experts that it holds whole: all tokens travel to all ranks then, and no host looks at a count, as
    `dispatch` does. m: t, where W does not divide it. Returns `[t/W, k]`.
    plan: `push`, of calls that are not differentiated, is both halves in one, without a collective of the library. Of
    differentiated calls both halves take the plan, and those of whole experts are sequential. None: as there.

    Gradients: as those of the two halves. Raises as `all_gather_experts`.
    """
    name = "experts_mlp"
    with refusing(group):
        check_layer(name, weights)
        up, down, up_bias, down_bias, glu, first, up_scale, down_scale = weights
        least = 1 if first is None else 0
        check_first(name, x_shard, topk_ids, topk_weights, ((up, up_bias, up_scale), glu), least)
        check_down(name, weights[:5], down_scale)
        place = group_rank_of(group)
        tokens = _all_tokens(name, place, x_shard.shape[0], m)
        tensors = {"x": x_shard, "topk_weights": topk_weights, "up": up, "down": down, "bias": up_bias}
        tensors["down_bias"] = down_bias
        differentiated = _is_differentiated(*tensors.values())
        is_quicker = not differentiated and _is_quicker(place, x_shard, tokens, x_shard.shape[1])
        chosen_plan = choose(name, plan, _reason(x_shard, down.transpose(1, 2)), is_quicker)
        exchange = exchange_in(group, _told(name, topk_ids, up, tensors, glu, first is not None))
    if first is not None:
        check_whole(exchange, topk_ids, first, up.shape[0])
    is_pushed = chosen_plan == PUSH and place.world_size > 1
    if is_pushed and differentiated and first is None:
        h, routed = all_gather_experts(x_shard, topk_ids, up, group, bias=up_bias, glu=glu, m=m, plan=plan)
        return experts_reduce_scatter(h, routed, topk_weights, down, group, bias=down_bias, plan=plan)
    ids, given = as_ids(topk_ids), topk_weights
    if is_pushed and not differentiated:
        given = torch.ones(ids.shape, dtype=torch.float32, device=ids.device) if given is None else given
        options = exchange.options | {"m": tokens, "glu": glu_word(glu), "first": first}
        y: torch.Tensor = torch.ops.overweave.chained_experts(
            x_shard, ids, given, up, down, up_bias, down_bias, **options
        )
    else:
        every, of_slots = _all_slots(exchange, ids, given, tokens)
        x = all_gather_rows(exchange, x_shard, tokens)
        with refusing(group):
            sums = weights.sums(x, every, of_slots)
        y = reduce_scatter_rows(exchange, sums)
    if down_bias is None or first is not None:
        return y
    return with_bias(y, (ids, topk_weights), replicated(exchange, down_bias))


def experts_all_reduce(
    h: torch.Tensor,
    topk_ids: TokensExperts,
    topk_weights: torch.Tensor | None,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    bias: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    plan: str | None = None,
) -> torch.Tensor:
    """y = all tokens of the sum over ranks, alike on every rank.

    Plain torch:  all_reduce(experts_sum(h, topk_ids, topk_weights, w)), then the biases

    As `experts_reduce_scatter`, of tokens that every rank has: topk_ids `[t, top]`, or what came with h, and
    topk_weights `[t, top]`, alike on every rank. Returns `[t, n]`. plan: `sequential`, or `push`: each rank owns tokens
    as torch.chunk deals them; columns of their sums travel to it while others are computed, are added in fp32 in the
    order of ranks, and go to all ranks, which get the same bits. None: the first.

    Gradients: of h, w, bias and topk_weights, the last summed over ranks; with `push`, too, they need nothing else
    that travels. Raises as `all_gather_experts`.
    """
    name = "experts_all_reduce"
    with refusing(group):
        place = group_rank_of(group)
        ids = topk_ids.topk_ids if isinstance(topk_ids, RoutedTokens) else topk_ids
        check_second(name, h, ids, topk_weights, (w, bias, scale_w))
        chosen_plan = choose(name, plan, _reason(h, w), name not in NOT_MEASURED)
        exchange = exchange_in(group, _told(name, ids, w, {"h": h, "topk_weights": topk_weights}))
        routed = topk_ids if isinstance(topk_ids, RoutedTokens) else routed_tokens(ids, w.shape[0])
    weights = None if topk_weights is None else replicated(exchange, topk_weights.float())
    if chosen_plan == PUSH and place.world_size > 1:
        y = torch.ops.overweave.total_experts(h, routed.topk_ids, weights, w, **exchange.options)
    else:
        y = all_reduce_rows(exchange, added(h, routed, weights, (w, None, scale_w)))
    return y if bias is None else with_bias(y, (ids, topk_weights), bias)


def _all_slots(
    exchange: Exchange, ids: torch.Tensor, weights: torch.Tensor | None, tokens: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the experts of all tokens and their weights, if there are any: one message of words of 32 bits."""
    ids = as_ids(ids)
    if weights is None:
        return all_gather_rows(exchange, ids, tokens), None
    words = all_gather_rows(exchange, torch.cat([ids.contiguous().view(torch.float32), weights.float()], 1), tokens)
    return words.detach()[:, : ids.shape[1]].view(torch.int32), words[:, ids.shape[1] :]


def _is_quicker(place: GroupRank, x: torch.Tensor, tokens: int, columns: int) -> bool:
    return pushing_is_quicker(place, x.device, tokens // place.world_size * columns * x.element_size())


def _is_differentiated(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _reason(rows: torch.Tensor, w: torch.Tensor) -> str:
    """Return why rows of these weights are not sent while others are multiplied; empty if they may be."""
    return "weights are fp8" if w.dtype == FP8 else obstacle(rows, w.shape[1])


def _all_tokens(name: str, place: GroupRank, own: int, m: int | None) -> int:
    """Return the tokens of all ranks. Raises InputError if m says that this rank has another number than it has."""
    if m is None:
        return own * place.world_size
    low, high = shard_rows(m, place.world_size, place.rank) if type(m) is int and m >= 0 else (0, -1)
    if high - low != own:
        found = f"rank {place.rank} of {place.world_size} passes {own} tokens of m={str(m)[:40]}"
        raise InputError(f"{name}: tokens dealt as torch.chunk deals them", found, "Deal them so, or mend m")
    return m


def _told(
    name: str,
    ids: torch.Tensor,
    w: torch.Tensor,
    differentiated: dict[str, torch.Tensor | None],
    glu: Glu | None = None,
    is_whole: bool = False,
) -> str:
    """A call in words that all ranks compare: they will compute gradients together. is_whole: ranks hold whole experts,
    as many as they please."""
    experts, n, k = ("whole" if is_whole else w.shape[0]), *w.shape[1:]
    is_on = torch.is_grad_enabled()
    names = [key for key, each in differentiated.items() if is_on and each is not None and each.requires_grad]
    of_gradients = f" with gradients of {' '.join(names)}" if names else ""
    given = [key for key in ("topk_weights", "bias", "down_bias") if differentiated.get(key) is not None]
    extras = f" with {' '.join(given)}" if given else ""
    fp8, between = " in fp8" * (w.dtype == FP8), "" if glu is None else f" glu {glu_word(glu)}"
    return f"{name} of {experts} experts [{n}, {k}]{fp8}{between}, top {ids.shape[1]}{extras}{of_gradients}"
