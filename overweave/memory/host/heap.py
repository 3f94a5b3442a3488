"""The symmetric heap of CPU ranks: one part per rank, all parts mapped into every rank's process."""

from __future__ import annotations

from math import prod

import torch

from overweave.memory.board.board import Board
from overweave.memory.board.shared import create_shared_memory
from overweave.memory.layout import aligned


class HostHeap:
    """`size_bytes` zeroed bytes of every rank of a group. Collective: all ranks allocate in one order.

    tensor: this rank's part, uint8. addresses: of each rank's part, in this process. Raises MachineError on every rank
    if one cannot map it, PeerDied, PeerTimeout.
    """

    def __init__(self, board: Board, size_bytes: int, deadline_s: float | None = None) -> None:
        self._part_bytes, ranks = aligned(size_bytes), board.world_size
        file = create_shared_memory(
            board.rank,
            ranks * self._part_bytes,
            lambda data: board.all_gather_bytes(data, deadline_s),
            lambda file: None,
        )
        file.close_descriptor()
        self._memory = torch.frombuffer(file.memory, dtype=torch.uint8)
        self._bytes, self._rank = file.memory, board.rank
        self.tensor = self._memory[board.rank * self._part_bytes :][: self._part_bytes]
        self.addresses = tuple(self._memory.data_ptr() + rank * self._part_bytes for rank in range(ranks))

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, rank: int | None = None) -> torch.Tensor:
        """Return a row-major tensor, `offset` bytes from the start of a rank's part. rank: None for this rank."""
        start = (self._rank if rank is None else rank) * self._part_bytes + offset
        return self._memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def words(self, offset: int, count: int, rank: int | None = None) -> memoryview:
        """Return int32 words of a rank's part: a memoryview, which Python reads and writes quicker than a tensor."""
        start = (self._rank if rank is None else rank) * self._part_bytes + offset
        return self._bytes[start : start + 4 * count].cast("i")
