"""Copies of the copy engine alone: every shard to every peer in ring order, without signals or waits.

It is the upper bound for overlapped methods, which move their chunks in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from overweave.errors import PACKAGES, MachineError
from overweave.memory.cuda.heap import CudaHeap
from overweave.memory.group import Group
from overweave.memory.steps import CopyStep, MemoryRef

try:
    from overweave.memory.cuda.copy_engine import CopyQueue
except ImportError:  # cuda-bindings is an extra: without it there is no copy engine to measure
    HAS_COPY_ENGINE = False
else:
    HAS_COPY_ENGINE = True

CopyPiece = tuple[int, int, int]  # offset in the sent tensor, offset in the peer's landing zone, length: all in bytes


class PeerCopies:
    """Pushes pieces of one tensor into the peers' landing zones. Built collectively. piece: peer -> the piece for it.
    landing_bytes: size of the zone of each rank, the same on every rank. rounds: how many times all of it is pushed."""

    def __init__(
        self, group: Group, device: torch.device, landing_bytes: int, piece: Callable[[int], CopyPiece], rounds: int = 1
    ) -> None:
        if not HAS_COPY_ENGINE:
            raise MachineError("measure the copy engine", "cuda-bindings is not installed", PACKAGES["cuda"])
        self._heap = CudaHeap(group, device, landing_bytes)
        self.stream = torch.cuda.Stream(device, priority=-1)
        steps = []
        for distance in range(1, group.world_size):
            peer = (group.rank - distance) % group.world_size
            source, target, length = piece(peer)
            if length:
                landing = MemoryRef(None, self._heap.addresses[peer] + target, length)
                steps.append(CopyStep(MemoryRef("sent", source, length), landing, length, 1))
        self._queue = CopyQueue(tuple(steps) * rounds)

    def start(self, sent: torch.Tensor) -> None:
        """Begin to push, on a side stream, behind the work on the current stream."""
        self.stream.wait_stream(torch.cuda.current_stream())
        addresses = {"sent": sent.data_ptr()}
        if not torch.cuda.is_current_stream_capturing():
            self._queue.prepare(self.stream.cuda_stream, addresses)
        self._queue.launch(self.stream.cuda_stream, addresses)

    def join(self) -> None:
        """Make the current stream wait for the pushes."""
        torch.cuda.current_stream().wait_stream(self.stream)
