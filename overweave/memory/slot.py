"""A slot of a workspace, on a GPU or a CPU: one of two in a symmetric heap, which calls use in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

SLOTS = 2
SMALLEST_SLOT_BYTES = 16 << 20


class Heap(Protocol):
    """Memory that every rank of a group can address.

    tensor: the own part, uint8. addresses: where each rank's part lies in this rank's address space.
    """

    tensor: torch.Tensor
    addresses: tuple[int, ...]

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A row-major tensor in the own part, `offset` bytes from its start."""


@dataclass
class Slot:
    """One slot as a plan that leased it sees it, for good: a workspace that grows leaves it where it is."""

    heap: Heap
    number: int
    offset: int

    @property
    def bases(self) -> tuple[int, ...]:
        """Where the slot lies on each rank, as this rank addresses it."""
        return tuple(address + self.offset for address in self.heap.addresses)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the own part of the slot."""
        return self.heap.view(self.offset + offset, shape, dtype)
