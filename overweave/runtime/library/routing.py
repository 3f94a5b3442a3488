"""The tables of a routing in plain torch: what a CPU computes, and what tests compare with."""

from __future__ import annotations

import torch

from overweave.errors import InputError
from overweave.runtime.kernel_calls.routing import RoutingSizes, tables_of


def route(ids: torch.Tensor, starts: torch.Tensor | None, words: torch.Tensor, sizes: RoutingSizes) -> None:
    """Fill the tables. Raises InputError for an id that is neither an expert's nor -1."""
    flat, experts = ids.flatten().long(), sizes.experts
    wrong = (flat < -1) | (flat >= experts)
    if wrong.any():
        found = f"topk_ids name {int(flat[wrong][0])}"
        raise InputError(f"route to {experts} experts", found, "Name experts from 0 on, or -1 for none")
    counts, offsets, order, places, tokens, tiles, sources, count, reason = tables_of(words, sizes)
    key = torch.where(flat >= 0, flat, experts)
    pairs = key.sort(stable=True).indices
    order.copy_(pairs)
    places[pairs] = torch.arange(sizes.pairs, dtype=torch.int32)
    tokens.copy_(pairs // max(1, sizes.top))
    counts.copy_(torch.bincount(key, minlength=experts + 1)[:experts])
    offsets[0], offsets[1:] = 0, counts.cumsum(0)
    made = [tile for expert in range(experts) for tile in _tiles_of(expert, offsets, sizes.block_m)]
    tiles.zero_()
    sources.zero_()
    if made:
        tiles[: len(made)] = torch.tensor(made, dtype=torch.int32)
        if starts is not None:
            ends = tiles[: len(made), 1:2] + torch.stack(
                [torch.zeros(len(made), dtype=torch.int32), tiles[: len(made), 2] - 1], 1
            )
            sources[: len(made)] = torch.bucketize(tokens[ends.long()], starts[1:-1], right=True, out_int32=True)
    count[0], reason[0] = len(made), 0


def _tiles_of(expert: int, offsets: torch.Tensor, block_m: int) -> list[tuple[int, int, int]]:
    start, end = int(offsets[expert]), int(offsets[expert + 1])
    return [(expert, row, min(block_m, end - row)) for row in range(start, end, block_m)]
