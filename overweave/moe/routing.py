"""Which pair of a token and an expert lies where: the tables of a mixture-of-experts layer, from `topk_ids` alone.

A pair is a token and one of its `top` experts; pair `token * top + slot` chooses expert `topk_ids[token, slot]`. Pairs
are sorted by expert, those of one expert in their own order, so that tokens ascend there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from overweave.errors import InputError
from overweave.ops.call.surroundings import is_watched


class Routing(NamedTuple):
    """Tables of one routing, all int32 on the device of `topk_ids`. E experts, P pairs, T the most tiles that P rows of
    E experts can have: `most_tiles(P, E, block_m)`.

    counts [E]: rows of each expert. offsets [E + 1]: where the rows of each expert begin, and where the last ends.
    order [P]: the pair of each row; behind `offsets[E]` the pairs without an expert, in their order.
    places [P]: the row of each pair: the inverse of `order`. tokens [P]: the token of each row, `order // top`.
    tiles [T, 3]: of each tile of at most block_m rows its expert, first row and rows; zeros behind the last tile.
    sources [T, 2]: the first and the last source whose tokens a tile reads; without `starts` zeros.
    count [1]: how many tiles there are.
    reason [1]: 0, or why the tables are void or short of pairs: BAD_IDS, LATE.
    """

    counts: torch.Tensor
    offsets: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    tokens: torch.Tensor
    tiles: torch.Tensor
    sources: torch.Tensor
    count: torch.Tensor
    reason: torch.Tensor


# Bits of `Routing.reason`. BAD_IDS: an id is neither an expert's nor NO_EXPERT; its pair has no expert.
# LATE: the programs of the kernel did not meet before the deadline; all tables are void: no pair has an expert.
BAD_IDS, LATE = 1, 2
NO_EXPERT = -1  # an id that says that the slot is not used


def most_tiles(pairs: int, experts: int, block_m: int) -> int:
    """Return how many tiles of `block_m` rows there are at most, whatever the routing."""
    return pairs // block_m + min(pairs, experts)


def route(topk_ids: torch.Tensor, experts: int, block_m: int = 128, starts: torch.Tensor | None = None) -> Routing:
    """Compute all tables of a routing; on a GPU in one kernel launch, without a look of the host.

    topk_ids: int32 `[tokens, top]`, any memory layout; NO_EXPERT (-1) marks a slot without an expert. A token may
    name an expert twice: these are two pairs. starts: int32 `[sources + 1]`, ascending, on the device: the tokens of
    source s are `[starts[s], starts[s + 1])`. Plain torch:

        flat = topk_ids.flatten()
        key = torch.where((flat >= 0) & (flat < experts), flat, experts)
        order = key.sort(stable=True).indices
        counts = torch.bincount(key, minlength=experts + 1)[:experts]

    Raises InputError for another dtype or shape; on a CPU for ids out of range, too. On a GPU these are pairs without
    an expert, and `reason` says so.
    """
    if topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.dim() != 2:
        found = f"got {topk_ids.dtype} {list(topk_ids.shape)}"
        raise InputError("route topk_ids [tokens, top]", found, "Pass the experts of each token, int32")
    flat = topk_ids.flatten()
    bad = (flat < NO_EXPERT) | (flat >= experts)
    if not flat.is_cuda and not is_watched() and bool(bad.any()):
        found, cure = f"{int(flat[bad][0])} is among them", f"Pass experts, or {NO_EXPERT} for none"
        raise InputError(f"route topk_ids below {experts}", found, cure)
    key = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = key.sort(stable=True).indices.int()
    counts = (key.unsqueeze(0) == torch.arange(experts, device=key.device).unsqueeze(1)).sum(1).int()
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    rows = torch.arange(order.shape[0], device=key.device).int()
    places = torch.empty_like(order).scatter(0, order.long(), rows)
    void = counts.new_zeros
    tiles, sources = void((most_tiles(order.shape[0], experts, block_m), 3)), void((1, 2))
    reason = bad.any().int().view(1) * BAD_IDS
    return Routing(counts, offsets, order, places, order // topk_ids.shape[1], tiles, sources, void((1,)), reason)
