"""Where the tiles of a kernel store at other ranks (kernels/stored.py), as its launch takes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from overweave.runtime.gpu.kernels.arguments import Moving


class Peers(NamedTuple):
    """places: int64, a row of two for each rank (memory/lower.peer_places); behind them where sums of peers lie here,
    or 0, and how far apart strips are stored (runtime/gpu/kernels/peer_store_throttle.py). distances: of the slot of
    each peer behind the own one in bytes, the next rank first. spread: the own instance of the buffer where sums go at
    peers, if they go to every rank.
    """

    places: torch.Tensor
    distances: tuple[int, ...]
    spread: torch.Tensor | None

    @property
    def everyone(self) -> int | None:
        """How many ranks there are, if sums go to all of them."""
        return None if self.spread is None else len(self.distances) + 1

    def at(self, own: torch.Tensor) -> Iterator[Moving]:
        """Where a buffer of the workspace lies at each peer, by its own instance."""
        return (Moving(own.data_ptr() + distance, own.dtype) for distance in self.distances)
