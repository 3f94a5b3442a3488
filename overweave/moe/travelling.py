"""What travels with a token, and how: rows as words of 32 bits; its experts, weights and scales beside them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from overweave.ir.shards import shard_rows
from overweave.moe.routing import NO_EXPERT

WHOLE_BYTES = 16  # of rows, and of what lies beside them


class Travelling(NamedTuple):
    """What is dispatched: rows, their scales, and the router's choice."""

    x: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    ids: torch.Tensor

    def beside(self) -> torch.Tensor:
        """Words beside each row: its experts, one more than their numbers, so that 0 is none; its weights; its
        scales."""
        floats = [each for each in (self.weights, self.scales) if each is not None]
        words = [self.ids.to(torch.int32) + 1, *(each.float().contiguous().view(torch.int32) for each in floats)]
        return as_words(torch.cat(words, 1))

    def read(self, beside: torch.Tensor, experts: int, place: list[int]) -> tuple[torch.Tensor, ...]:
        """Experts, weights and scales of rows that a rank received, given the words beside them: its own experts,
        numbered from its first one, and -1; weights of these, else 0; no columns of what does not travel."""
        top, (rank, ranks) = self.ids.shape[1], place
        low, high = shard_rows(experts, ranks, rank)
        own = beside[:, :top] - (1 + low)
        is_own = (own >= 0) & (own < high - low)
        widths = [0 if each is None else each.shape[1] for each in (self.weights, self.scales)]
        parts = beside[:, top : top + sum(widths)].split(widths, 1)
        weights, scales = (part.contiguous().view(torch.float32) for part in parts)
        if self.weights is not None:
            weights = torch.where(is_own, weights, 0.0)
        return torch.where(is_own, own, NO_EXPERT), weights, scales


def as_words(rows: torch.Tensor) -> torch.Tensor:
    """Rows as int32 words, whole ones of 16 bytes, behind which zeros may stand."""
    raw = rows.contiguous().view(torch.uint8)
    width = max(WHOLE_BYTES, -(-raw.shape[1] // WHOLE_BYTES) * WHOLE_BYTES)
    if raw.shape[1] < width:
        wide = raw.new_zeros((raw.shape[0], width))
        wide[:, : raw.shape[1]] = raw
        raw = wide
    return (raw if raw.data_ptr() % WHOLE_BYTES == 0 else raw.clone()).view(torch.int32)


def as_rows(words: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Words as rows of the width and dtype of others."""
    of_row = like.shape[1] * like.element_size()
    raw = words.view(torch.uint8)
    return (raw if raw.shape[1] == of_row else raw[:, :of_row].contiguous()).view(like.dtype)
