"""What travels with a token, and how: rows as words of 32 bits; its experts, weights and scales as metadata."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from overweave.ir.shards import shard_rows
from overweave.moe.routing import NO_EXPERT, Routing
from overweave.runtime.backends import load

WORD_BYTES = 4
WHOLE_BYTES = 16  # of rows, and of their metadata


class Travelling(NamedTuple):
    """What is dispatched: rows, their scales, and the router's choice."""

    x: torch.Tensor
    row_scales: torch.Tensor | None
    weights: torch.Tensor | None
    ids: torch.Tensor

    def metadata(self) -> torch.Tensor:
        """Return words for each row: its experts, one more than their numbers, so that 0 is none; its weights; its
        scales."""
        floats = [each for each in (self.weights, self.row_scales) if each is not None]
        words = [self.ids.to(torch.int32) + 1, *(dense(each.float()).view(torch.int32) for each in floats)]
        return as_words(torch.cat(words, 1))

    def targets_and_metadata(self, experts: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rank of each expert of a token, int32 `[t, top]`: -1 where there is none, or an earlier one of the
        token is on that rank; `ranks` of wrong ids. And the metadata; on a GPU in one launch."""
        ids, each = self.ids, -(-experts // ranks)
        if ids.is_cuda:
            floats = sum(0 if wide is None else wide.shape[1] for wide in (self.weights, self.row_scales))
            words = -(-(ids.shape[1] + floats) * WORD_BYTES // WHOLE_BYTES) * WHOLE_BYTES // WORD_BYTES
            outputs = (ids.new_empty(ids.shape, dtype=torch.int32), ids.new_empty((len(ids), words), dtype=torch.int32))
            given = (dense(ids), dense(self.weights), dense(self.row_scales))
            load("gpu choose ranks")(given, outputs, (experts, each, ranks))
            return outputs
        others = torch.where(ids == NO_EXPERT, NO_EXPERT, ranks)
        targets = torch.where((ids >= 0) & (ids < experts), ids // each, others).to(torch.int32)
        is_again = (targets.unsqueeze(2) == targets.unsqueeze(1)).tril(-1).any(2)
        return torch.where(is_again, NO_EXPERT, targets), self.metadata()

    def read(self, metadata: torch.Tensor, experts: int, place: list[int]) -> tuple[torch.Tensor, ...]:
        """Experts, weights and scales of rows that a rank received, given their metadata: its own experts,
        numbered from its first one, and -1; weights of these, else 0; no columns of what does not travel."""
        top, (rank, ranks) = self.ids.shape[1], place
        low, high = shard_rows(experts, ranks, rank)
        widths = [0 if each is None else each.shape[1] for each in (self.weights, self.row_scales)]
        if metadata.is_cuda:
            ids = metadata.new_empty((len(metadata), top))
            floats = [metadata.new_empty((len(metadata), width), dtype=torch.float32) for width in widths]
            outputs = (ids, *(each if each.shape[1] else None for each in floats))
            load("gpu read metadata")(metadata, outputs, (low, high))
            return ids, *floats
        own = metadata[:, :top] - (1 + low)
        is_own = (own >= 0) & (own < high - low)
        parts = metadata[:, top : top + sum(widths)].split(widths, 1)
        whole = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        weights, scales = (each.view(torch.float32) for each in whole)
        if self.weights is not None:
            weights = torch.where(is_own, weights, 0.0)
        return torch.where(is_own, own, NO_EXPERT), weights, scales


def positions_of(targets: torch.Tensor, routed: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of a token among those for each rank, int32 `[t, W]`, -1 for none; and `[W + 1]`: how many go to
    each, and the reason for which that may be wrong. targets: of `targets_and_metadata`, routed as experts are."""
    ranks = routed.counts.shape[0]
    if targets.is_cuda:
        outputs = (targets.new_empty((len(targets), ranks)), targets.new_empty(ranks + 1))
        load("gpu place rows")(targets, (routed.places, routed.offsets, routed.counts, routed.reason), outputs)
        return outputs
    to = torch.where((targets >= 0) & (targets < ranks), targets, ranks).long()
    position = routed.places.view(targets.shape) - routed.offsets.index_select(0, to.flatten()).view(targets.shape)
    positions = torch.full((len(targets), ranks + 1), NO_EXPERT, dtype=torch.int32)
    positions = positions.scatter_(1, to, position)[:, :ranks].contiguous()
    return positions, torch.cat([routed.counts, routed.reason])


Dense = TypeVar("Dense", torch.Tensor, torch.Tensor | None)


def dense(each: Dense) -> Dense:
    """Return a tensor whose rows follow each other and whose elements of a row do: of none or one of either torch calls
    any strides contiguous."""
    if each is None:
        return each
    width = 1
    for size, stride in zip(reversed(each.shape), reversed(each.stride()), strict=True):
        if stride != width:
            return each.clone(memory_format=torch.contiguous_format)
        width *= max(1, size)
    return each


def as_words(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as int32 words, whole ones of 16 bytes, behind which zeros may stand."""
    raw = dense(rows).view(torch.uint8)
    width = max(WHOLE_BYTES, -(-raw.shape[1] // WHOLE_BYTES) * WHOLE_BYTES)
    if raw.shape[1] < width:
        wide = raw.new_zeros((raw.shape[0], width))
        wide[:, : raw.shape[1]] = raw
        raw = wide
    return (raw if raw.data_ptr() % WHOLE_BYTES == 0 else raw.clone()).view(torch.int32)


def as_rows(words: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return words as rows of the width and dtype of others."""
    of_row = like.shape[1] * like.element_size()
    raw = words.view(torch.uint8)
    return (raw if raw.shape[1] == of_row else raw[:, :of_row].contiguous()).view(like.dtype)
