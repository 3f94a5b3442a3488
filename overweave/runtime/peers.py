"""Where the tiles of a kernel store at other ranks (kernels/stored.py), as its launch takes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from overweave.runtime.kernels import Moving


class Peers(NamedTuple):
    """places: int64 `[world_size, 2]` (memory/lower.peer_places). distances: of the slot of each peer behind the own
    one in bytes, the next rank first. spread: the own instance of where sums go at every rank; None if none do.
    """

    places: torch.Tensor
    distances: tuple[int, ...]
    spread: torch.Tensor | None

    @property
    def everyone(self) -> int | None:
        """How many ranks there are, if sums go to all of them."""
        return None if self.spread is None else len(self.places)

    def at(self, own: torch.Tensor) -> Iterator[Moving]:
        """Where a buffer of the workspace lies at each peer, by its own instance."""
        return (Moving(own.data_ptr() + distance, own.dtype) for distance in self.distances)
