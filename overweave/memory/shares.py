"""Memory for tiles that are dealt out along k (`TileRow.shares`): what shares leave for the last one, and counters."""

from __future__ import annotations

from typing import NamedTuple

import torch

from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import MatmulConfig
from overweave.ir.tile_order import ARRIVAL_WORDS


def share_numbers(config: MatmulConfig, epilogue: Epilogue) -> int:
    """Of fp32, that a share leaves: a tile's products, two if it is gated."""
    return config.block_m * config.block_n * epilogue.products


class Shares(NamedTuple):
    """partials: fp32, of so many places. arrivals: int32, `ARRIVAL_WORDS` for each place; zero between launches."""

    partials: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def allocate(cls, places: int, numbers: int, device: torch.device) -> Shares:
        """Of so many numbers at each place."""
        partials = torch.empty(places * numbers, dtype=torch.float32, device=device)
        return cls(partials, torch.zeros(places * ARRIVAL_WORDS, dtype=torch.int32, device=device))

    def holds(self, places: int, numbers: int) -> bool:
        """Whether there is room."""
        return places * numbers <= self.partials.numel() and places * ARRIVAL_WORDS <= self.arrivals.numel()


class SharedShares:
    """Those of a workspace, whose calls run one after the other, so that all have the same memory.

    It grows by a new piece: launches that were bound earlier keep to theirs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[Shares] = []

    def get(self, places: int, numbers: int) -> Shares:
        """Room for so many places of so many numbers."""
        if not self._pieces or not self._pieces[-1].holds(places, numbers):
            self._pieces.append(Shares.allocate(places, numbers, self._device))
        return self._pieces[-1]

    def are_unused(self) -> bool:
        """Whether all counters are at zero, as a launch finds and leaves them. Waits for the device."""
        return not any(bool(piece.arrivals.any()) for piece in self._pieces)

    def clear(self) -> None:
        """Counters of launches that were cut off."""
        for piece in self._pieces:
            piece.arrivals.zero_()
