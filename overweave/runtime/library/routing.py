"""The tables of a routing in plain torch: what a CPU computes, and what tests compare with."""

from __future__ import annotations

import torch

from overweave.errors import InputError
from overweave.runtime.kernel_calls.routing import RoutingSizes, tables_of


def route(ids: torch.Tensor, words: torch.Tensor, sizes: RoutingSizes) -> None:
    """Fill the tables. Raises InputError for an id that is neither an expert's nor -1."""
    flat, experts = ids.flatten().long(), sizes.experts
    wrong = (flat < -1) | (flat >= experts)
    if wrong.any():
        found = f"topk_ids name {int(flat[wrong][0])}"
        raise InputError(f"route to {experts} experts", found, "Name experts from 0 on, or -1 for none")
    counts, offsets, order, places, tokens, bounds, reason = tables_of(words, sizes)
    key = torch.where(flat >= 0, flat, experts)
    pairs = key.sort(stable=True).indices
    order.copy_(pairs)
    places[pairs] = torch.arange(sizes.pairs, dtype=torch.int32)
    tokens.copy_(pairs // max(1, sizes.top))
    counts.copy_(torch.bincount(key, minlength=experts + 1)[:experts])
    offsets[0], offsets[1:] = 0, counts.cumsum(0)
    for source in range(sizes.sources):
        ahead = key[: source * sizes.shard * sizes.top]
        bounds[source] = offsets[:-1] + torch.bincount(ahead, minlength=experts + 1)[:experts]
    reason[0] = 0
