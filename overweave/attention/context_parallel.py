"""Attention over a sequence that ranks share, as torch's `scaled_dot_product_attention` computes it of all."""

from __future__ import annotations

from typing import Any

import torch

from overweave.attention.checks import NAME, Asked, all_tokens, check_operands, check_words, chosen_plan
from overweave.attention.choice import quickest
from overweave.attention.heads import heads_of_all_rows, rows_of_all_heads
from overweave.attention.pieces import wide
from overweave.attention.plain import Three
from overweave.attention.sequence import CONTIGUOUS, ZIGZAG, zigzag_order
from overweave.attention.split import split_attention
from overweave.memory.group import GroupLike
from overweave.ops.dispatch.collectives import Exchange, exchange_in
from overweave.ops.dispatch.route import GroupRank, group_rank_of, refusing
from overweave.schedules.records.attention import HEADS


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: GroupLike = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    sequence: str = CONTIGUOUS,
    tokens: int | None = None,
    return_lse: bool = False,
    plan: str | None = None,
) -> Any:
    """This rank's rows of the attention of all ranks' queries over all ranks' keys.

    Plain torch:  shard(scaled_dot_product_attention(gather(q), gather(k), gather(v), is_causal=is_causal, scale=scale))

    q: `[b, h, s/W, d]`. k, v: `[b, g, s/W, d]`; enable_gqa: g divides h, and h/g heads of q share one of k and v.
    sequence: which rows a rank has: `contiguous`, the shards of torch.chunk, or `zigzag`, of 2 W pieces of s the r-th
    from the front and the r-th from the end, as torch's head-tail load balancing: causal work is balanced then.
    tokens: s, where W does not divide it. window: a query sees so many keys, its own the last; needs is_causal.
    cu_seqlens: int32 `[documents + 1]`, where documents begin in the s tokens and where the last ends, alike on all
    ranks: q is `[s/W, h, d]` then, k and v `[s/W, g, d]`, and tokens see their own document, or nothing: zeros.

    plan: `sequential`: the library gathers keys and values first. `per_shard`: each rank pushes them to those that see
    them, which compute shard by shard as they arrive. `ring`: each passes a shard on to the next while it computes on
    it, in the memory of two. `double_ring`: shards go round islands of ranks, and meanwhile on to the next island.
    `heads`: by all-to-alls a rank gets h/W heads of all rows, and back. None: on GPUs the one that is
    predicted to be quickest, by a margin (`overweave bench attention --simulate`), else the first that can run. Results
    of `sequential`, `per_shard` and `ring` have the same bits.

    Returns as q `[b, h, s/W, d]`, in its dtype, or of documents `[s/W, h, d]`; return_lse: also the log-sum-exp of the
    scores, `[b, h, s/W]` or `[h, s/W]`, fp32, not differentiated; minus infinity where a query sees no key.
    Gradients: of q, k and v; what ranks have of the latter two is summed in fp32: by the library (`sequential`), in the
    order of ranks (`per_shard`), or from the owner on (rings).

    Raises InputError on all ranks for arguments it cannot take, RankMismatch if ranks differ, PeerError for a peer that
    died or stalled. Source: TileLink, section 5; Ring attention; DeepSpeed-Ulysses.
    """
    asked = Asked(is_causal, window, sequence, tokens, plan)
    is_packed = cu_seqlens is not None
    with refusing(group):
        check_words(is_causal, scale)
        check_operands(q, k, v, cu_seqlens, enable_gqa)
        place = group_rank_of(group)
        if is_packed:
            q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
        rows = all_tokens(place, q.shape[2], asked)
        chosen = _chosen(place, (q, k, v), rows, asked, is_packed)
        scale = q.shape[3] ** -0.5 if scale is None else float(scale)
        exchange = exchange_in(group, _told((q, k, v), rows, asked._replace(plan=chosen), (scale, is_packed)))
    mask = {"rows": rows, "is_causal": is_causal, "window": window, "scale": scale}
    out, lse = _by_plan(exchange, (q, k, v), cu_seqlens, asked._replace(plan=chosen), mask)
    if is_packed:
        out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse.to(wide(out.dtype))) if return_lse else out


def _chosen(place: GroupRank, given: Three, rows: int, asked: Asked, is_packed: bool) -> str:
    """The plan that is asked for, or the quickest that can run. rows: of all ranks. Raises InputError."""
    q, k, _ = given
    chosen = chosen_plan((q.shape[1], k.shape[1]), place.world_size, is_packed, asked)
    if asked.plan is not None or chosen == HEADS:  # the only one that can run
        return chosen
    is_trained = torch.is_grad_enabled() and any(each.requires_grad for each in given)
    sizes = q.shape[0], q.shape[1], k.shape[1], rows, q.shape[3]
    return quickest(place, q.device, sizes, (asked.is_causal, asked.sequence, asked.window, is_trained))


def _by_plan(
    exchange: Exchange, given: Three, cu_seqlens: torch.Tensor | None, asked: Asked, mask: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """By `heads` some of the whole sequence on each rank, which it computes alone."""
    is_zigzag, order = asked.sequence == ZIGZAG, None
    if asked.plan != HEADS or exchange.place.world_size == 1:
        options = mask | {"is_zigzag": is_zigzag, "plan": asked.plan}
        return split_attention(given, cu_seqlens, options | exchange.options)
    q, k, v = (heads_of_all_rows(exchange, each, mask["rows"]) for each in given)
    if is_zigzag:
        order = zigzag_order(mask["rows"], exchange.place.world_size, given[0].device)
        q, k, v = (each.index_select(2, order.argsort()) for each in (q, k, v))
    alone = {"group_name": "", "told": exchange.told, "place": [0, 1], "is_zigzag": False, "plan": HEADS}
    out, lse = split_attention((q, k, v), cu_seqlens, mask | alone)
    if order is not None:
        out, lse = out.index_select(2, order), lse.index_select(2, order)
    return rows_of_all_heads(exchange, out), rows_of_all_heads(exchange, lse.unsqueeze(3)).squeeze(3)


def _told(given: tuple[torch.Tensor, ...], rows: int, asked: Asked, beside: tuple[float, bool]) -> str:
    """A call in words that all ranks compare: they will compute gradients together."""
    (q, k, _), (scale, is_packed) = given, beside
    names = [name for name, each in zip("qkv", given, strict=True) if torch.is_grad_enabled() and each.requires_grad]
    of_gradients = f" with gradients of {' '.join(names)}" if names else ""
    mask = f"{'causal ' * asked.is_causal}{'documents ' * is_packed}window {asked.window} scale {scale}"
    heads = f"{q.shape[1]} and {k.shape[1]} heads [{q.shape[0]}, {int(rows)}, {q.shape[3]}] {q.dtype}"
    return f"{NAME} of {heads}, {asked.sequence}, {mask}, by {asked.plan}{of_gradients}"
