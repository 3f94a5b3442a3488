"""Symmetric memory as its users see it, on GPUs (memory/cuda/heap.py) and on CPUs (memory/host/heap.py)."""

from __future__ import annotations

from typing import Protocol

import torch


class Heap(Protocol):
    """Memory that every rank of a group can address.

    tensor: the own part, uint8. addresses: where each rank's part lies in this rank's address space.
    """

    tensor: torch.Tensor
    addresses: tuple[int, ...]

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A row-major tensor in the own part, `offset` bytes from its start."""
