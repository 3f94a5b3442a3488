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


# The memory of packed messages: apart from the slots, because no head of a call guards it.
#
# Only packed kernels touch it, and a local word counts their calls; so plans with slots may run between them, as if
# these calls had not been.

HALVES = 2


class PackedSpace:
    """heap: of two halves. spaces: where each rank's lies, int64 `[world_size]` on the device.

    state: the calls so far (memory/device/packed.py). product: local memory for what is about to be pushed, or what has
    been gathered; calls follow each other in stream order, so one will do.
    """

    def __init__(self, heap: Heap, device: torch.device, half_bytes: int) -> None:
        self.half_bytes, self._heap = half_bytes, heap
        self.spaces = torch.tensor(heap.addresses, dtype=torch.int64, device=device)
        self.state = torch.zeros(1, dtype=torch.int64, device=device)
        # Of a call's half, messages take 4/3 of a product at least: of one shot W times, of two shots twice as much.
        self._product = torch.empty(half_bytes * 3 // 4, dtype=torch.uint8, device=device)

    def product(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """A row-major matrix in the local memory."""
        size_bytes = shape[0] * shape[1] * dtype.itemsize
        return self._product[:size_bytes].view(dtype).view(shape)

    def clear(self) -> None:
        """No message has come and no call has begun: while every rank's device is idle."""
        self._heap.tensor.zero_()
        self.state.zero_()
