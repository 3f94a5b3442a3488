"""Sums over the slots of tokens in plain torch: what a CPU computes, and what tests compare with."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SlotSums(NamedTuple):
    """What is added. z `[pairs, cols]`: products, a row for each pair of a token and an expert. places: int32 `[rows,
    slots]`, the row of each; routed: int32 `[1]`, how many rows have an expert: a place from there on adds nothing.
    weights: fp32 `[rows, slots]`, by which products are multiplied, or None. landed: what ranks have of the rows,
    `[ranks, rows, cols]`, in which that of `rank`, this one, is but a place; None: the own sums are all.
    """

    z: torch.Tensor
    places: torch.Tensor
    routed: torch.Tensor
    weights: torch.Tensor | None = None
    landed: torch.Tensor | None = None
    rank: int = 0


def add(sums: SlotSums) -> torch.Tensor:
    """`[rows, cols]`: in fp32, slot by slot, rounded; then those of all ranks in fp32, in their order, and rounded."""
    z, places, routed, weights, landed, rank = sums
    is_there = places < routed
    total = torch.zeros(places.shape[0], z.shape[1], dtype=torch.float32, device=z.device)
    for slot in range(places.shape[1]):
        its = is_there[:, slot]
        product = z[places[its, slot].long()].float()
        total[its] += product if weights is None else product * weights[its, slot, None].float()
    own = total.to(z.dtype)
    if landed is None:
        return own
    parts = (own if peer == rank else part for peer, part in enumerate(landed))
    return sum((part.float() for part in parts), torch.zeros_like(total)).to(z.dtype)
