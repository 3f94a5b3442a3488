"""Where the tiles of a kernel store at other ranks (kernels/stored.py), as its call takes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from overweave.runtime.kernel_calls.call import Matrix, Moving


class Peers(NamedTuple):
    """places: int64, a row of two for each rank (memory/lower.peer_places); behind them where sums of peers lie here,
    or 0, and how far apart strips are stored (peer_store_throttle.py). distances: of the slot of each peer behind the
    own one in bytes, the next rank first. spread: the own instance of the buffer where sums go at peers, if they go to
    every rank.
    """

    places: torch.Tensor
    distances: tuple[int, ...]
    spread: torch.Tensor | None

    @property
    def everyone(self) -> int | None:
        """How many ranks there are, if sums go to all of them."""
        return None if self.spread is None else len(self.distances) + 1

    def at(self, own: Matrix) -> Iterator[Moving]:
        """A buffer of the workspace as it lies at each peer, by its own instance."""
        shape, strides = tuple(own.shape), own.stride()
        return (Moving(own.data_ptr() + distance, own.dtype, shape, strides) for distance in self.distances)
