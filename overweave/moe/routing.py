"""Which pair of a token and an expert lies where: the tables of a mixture-of-experts layer, from `topk_ids` alone.

A pair is a token and one of its `top` experts; pair `token * top + slot` chooses expert `topk_ids[token, slot]`. Pairs
are sorted by expert, those of one expert in their own order, so that tokens ascend there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from overweave.errors import InputError
from overweave.ops.dispatch.torch_ops import TorchOp, define
from overweave.runtime.backends import load
from overweave.runtime.kernel_calls.routing import RoutingSizes, tables_of, words_of
from overweave.runtime.library import routing as library

MOST_PAIRS = 1 << 30


class Routing(NamedTuple):
    """Tables of one routing, all int32 on the device of `topk_ids`. E experts, P pairs, T the most tiles that P rows of
    E experts can have: `most_tiles(P, E, block_m)`.

    counts [E]: rows of each expert. offsets [E + 1]: where the rows of each expert begin, and where the last ends.
    order [P]: the pair of each row; behind `offsets[E]` the pairs without an expert, in their order.
    places [P]: the row of each pair: the inverse of `order`. tokens [P]: the token of each row, `order // top`.
    tiles [T, 3]: of each tile of at most block_m rows its expert, first row and rows; zeros behind the last tile.
    sources [T, 2]: the first and the last source whose tokens a tile reads; without `starts` zeros.
    tile_count [1]: how many tiles there are.
    reason [1]: 0, or why the tables are void or short of pairs: BAD_IDS, LATE.
    """

    counts: torch.Tensor
    offsets: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    tokens: torch.Tensor
    tiles: torch.Tensor
    sources: torch.Tensor
    tile_count: torch.Tensor
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
    sizes = _sizes(topk_ids, experts, block_m, starts)
    words = torch.ops.overweave.route_experts(topk_ids, starts, experts, block_m)
    return Routing(*tables_of(words, sizes))


def _sizes(topk_ids: torch.Tensor, experts: int, block_m: int, starts: torch.Tensor | None) -> RoutingSizes:
    """Raises InputError for what no routing can be."""
    asked = f"route to {experts} experts"
    if topk_ids.dim() != 2 or topk_ids.dtype != torch.int32:
        raise InputError(asked, f"topk_ids are {topk_ids.dtype} {tuple(topk_ids.shape)}", "Pass int32 [tokens, top]")
    if experts < 1 or block_m < 1:
        raise InputError(asked, f"{experts} experts, tiles of {block_m} rows", "Pass one or more of both")
    if starts is not None and (starts.dim() != 1 or starts.dtype != torch.int32 or starts.shape[0] < 2):
        raise InputError(asked, f"starts are {starts.dtype} {tuple(starts.shape)}", "Pass int32 [sources + 1]")
    if starts is not None and starts.device != topk_ids.device:
        raise InputError(
            asked, f"starts are on {starts.device}, topk_ids on {topk_ids.device}", "Pass both on one device"
        )
    tokens, top = topk_ids.shape
    if tokens * top >= MOST_PAIRS:
        raise InputError(asked, f"{tokens} tokens of {top} experts each", f"Pass fewer than {MOST_PAIRS} pairs")
    return RoutingSizes(tokens * top, top, experts, block_m)


def _fill(topk_ids: torch.Tensor, starts: torch.Tensor | None, experts: int, block_m: int) -> torch.Tensor:
    tokens, top = topk_ids.shape
    sizes = RoutingSizes(tokens * top, top, experts, block_m)
    words = torch.empty(words_of(sizes), dtype=torch.int32, device=topk_ids.device)
    if topk_ids.device.type == "cpu":
        library.route(topk_ids, starts, words, sizes)
    else:
        load("gpu routing")(topk_ids, starts, words, sizes)
    return words


def _fake(topk_ids: torch.Tensor, starts: torch.Tensor | None, experts: int, block_m: int) -> torch.Tensor:
    tokens, top = topk_ids.shape
    return topk_ids.new_empty(words_of(RoutingSizes(tokens * top, top, experts, block_m)))


_ROUTE = "(Tensor topk_ids, Tensor? starts, int experts, int block_m) -> Tensor"
define(TorchOp("route_experts", _ROUTE, _fill, _fake))
