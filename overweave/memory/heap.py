"""Symmetric memory as its users see it, on GPUs (memory/cuda/heap.py) and on CPUs (memory/host/workspace.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Heap(Protocol):
    """Memory that every rank of a group can address.

    tensor: this rank's part, uint8. addresses: of each rank's part, in this rank's address space.
    """

    tensor: torch.Tensor
    addresses: tuple[int, ...]

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a row-major tensor in this rank's part, `offset` bytes from its start."""


def ranks_in_reach(addresses: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the ranks whose memory a rank addresses, itself among them. addresses: as of a Heap, in which a rank out
    of reach has this one's own."""
    return tuple(at for at, address in enumerate(addresses) if at == rank or address != addresses[rank])


# The memory of packed messages (memory/device/packed.py) is apart from the slots: no call prologue protects it.
# Only packed kernels access it, and a word of their own counts their calls: plans with slots may run in between.

HALVES = 2


class PackedSpace:
    """Memory for the messages of packed kernels, and local memory for what they push or have gathered.

    heap: of two halves. spaces: address of each rank's part, int64 `[world_size]` on the device. state: counts the
    calls (memory/device/packed.py). Calls follow each other in stream order: one product buffer serves all.
    """

    def __init__(self, heap: Heap, device: torch.device, half_bytes: int) -> None:
        self.half_bytes, self._heap = half_bytes, heap
        self.spaces = torch.tensor(heap.addresses, dtype=torch.int64, device=device)
        self.state = torch.zeros(1, dtype=torch.int64, device=device)
        # Messages take at least 4/3 of a product, and fill at most a half: so 3/4 of a half holds any product.
        self._product = torch.empty(half_bytes * 3 // 4, dtype=torch.uint8, device=device)

    def product(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return a row-major matrix in the local memory."""
        size_bytes = shape[0] * shape[1] * dtype.itemsize
        return self._product[:size_bytes].view(dtype).view(shape)

    def clear(self) -> None:
        """Forget all messages and calls. To be called while every rank's device is idle."""
        self._heap.tensor.zero_()
        self.state.zero_()
