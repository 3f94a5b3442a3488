"""Memory for split-K tiles of few rows: partial sums for the CTA that finishes last, and arrival counters."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Shares(NamedTuple):
    """Partial sums and counters. partials: fp32, by slot. arrivals: int32, one a slot, 0 when idle."""

    partials: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def allocate(cls, slots: int, elements: int, device: torch.device) -> Shares:
        """Allocate memory for so many partial sums of so many elements."""
        partials = torch.empty(slots * elements, dtype=torch.float32, device=device)
        return cls(partials, torch.zeros(slots, dtype=torch.int32, device=device))

    def holds(self, slots: int, elements: int) -> bool:
        """Return whether there is room for so many partial sums of so many elements."""
        return slots * elements <= self.partials.numel() and slots <= self.arrivals.numel()


class SharedShares:
    """Split-K memory of a workspace, used by all its calls: they run one after the other.

    It grows by a new allocation: launches that were bound earlier keep the older one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[Shares] = []

    def get(self, slots: int, elements: int) -> Shares:
        """Return memory for so many partial sums of so many elements; allocate if there is not enough."""
        if not self._pieces or not self._pieces[-1].holds(slots, elements):
            self._pieces.append(Shares.allocate(slots, elements, self._device))
        return self._pieces[-1]

    def are_unused(self) -> bool:
        """Return whether all counters are 0, as every launch finds and leaves them. Waits for the device."""
        return not any(bool(piece.arrivals.any()) for piece in self._pieces)

    def clear(self) -> None:
        """Zero the counters: launches that were aborted have not."""
        for piece in self._pieces:
            piece.arrivals.zero_()
