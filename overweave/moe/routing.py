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
    """Tables of one routing, all int32 on the device of `topk_ids`. E experts, P pairs, S sources of tokens.

    counts [E]: rows of each expert. offsets [E + 1]: where the rows of each expert begin, and where the last ends.
    order [P]: the pair of each row; behind `offsets[E]` the pairs without an expert, in their order.
    places [P]: the row of each pair: the inverse of `order`. tokens [P]: the token of each row, `order // top`.
    bounds [S, E]: where the rows of each expert begin that are of a source's tokens, or of one behind it.
    reason [1]: 0, or why the tables are void or short of pairs: BAD_IDS, LATE.
    """

    counts: torch.Tensor
    offsets: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    tokens: torch.Tensor
    bounds: torch.Tensor
    reason: torch.Tensor


# Bits of `Routing.reason`. BAD_IDS: an id is neither an expert's nor NO_EXPERT; its pair has no expert.
# LATE: the programs of the kernel did not meet before the deadline; all tables are void: no pair has an expert.
BAD_IDS, LATE = 1, 2
NO_EXPERT = -1  # an id that says that the slot is not used


def as_ids(ids: torch.Tensor) -> torch.Tensor:
    """Return experts as int32; numbers beyond its range stay out of the range of experts."""
    if ids.dtype == torch.int64:
        ids = ids.clamp(-(2**31), 2**31 - 1)
    return ids.to(torch.int32)


def route(topk_ids: torch.Tensor, experts: int, sources: int = 1) -> Routing:
    """Compute all tables of a routing; on a GPU in one kernel launch, without a look of the host.

    topk_ids: int32 `[tokens, top]`, any memory layout; NO_EXPERT (-1) marks a slot without an expert. A token may
    name an expert twice: these are two pairs. sources: tokens are dealt to so many as torch.chunk deals them. Plain
    torch:

        flat = topk_ids.flatten()
        key = torch.where((flat >= 0) & (flat < experts), flat, experts)
        order = key.sort(stable=True).indices
        counts = torch.bincount(key, minlength=experts + 1)[:experts]
        bounds[s] = offsets[:-1] + torch.bincount(key[: first pair of source s], minlength=experts + 1)[:experts]

    Raises InputError for another dtype or shape; on a CPU for ids out of range, too. On a GPU these are pairs without
    an expert, and `reason` says so.
    """
    sizes = _sizes(topk_ids, experts, sources)
    words = torch.ops.overweave.route_experts(topk_ids, experts, sources)
    return Routing(*tables_of(words, sizes))


def _sizes(topk_ids: torch.Tensor, experts: int, sources: int) -> RoutingSizes:
    """Return the sizes of a routing. Raises InputError for what no routing can be."""
    asked = f"route to {experts} experts"
    if not isinstance(topk_ids, torch.Tensor) or topk_ids.dim() != 2 or topk_ids.dtype != torch.int32:
        is_tensor = isinstance(topk_ids, torch.Tensor)
        found = f"{topk_ids.dtype} {tuple(topk_ids.shape)}" if is_tensor else type(topk_ids).__name__
        raise InputError(asked, f"topk_ids are {found}", "Pass int32 [tokens, top]")
    if not all(isinstance(each, int | torch.SymInt) and each >= 1 for each in (experts, sources)):
        raise InputError(asked, f"{experts} experts, tokens of {sources} sources", "Pass numbers of one or more")
    tokens, top = topk_ids.shape
    if tokens * top >= MOST_PAIRS:
        raise InputError(asked, f"{tokens} tokens of {top} experts each", f"Pass fewer than {MOST_PAIRS} pairs")
    return RoutingSizes(tokens * top, top, experts, sources)


def _fill(topk_ids: torch.Tensor, experts: int, sources: int) -> torch.Tensor:
    tokens, top = topk_ids.shape
    sizes = RoutingSizes(tokens * top, top, experts, sources)
    words = torch.empty(words_of(sizes), dtype=torch.int32, device=topk_ids.device)
    if topk_ids.device.type == "cpu":
        library.route(topk_ids, words, sizes)
    else:
        load("gpu routing")(topk_ids, words, sizes)
    return words


def _fake(topk_ids: torch.Tensor, experts: int, sources: int) -> torch.Tensor:
    tokens, top = topk_ids.shape
    return topk_ids.new_empty(words_of(RoutingSizes(tokens * top, top, experts, sources)))


_ROUTE = "(Tensor topk_ids, int experts, int sources) -> Tensor"
define(TorchOp("route_experts", _ROUTE, _fill, _fake))
