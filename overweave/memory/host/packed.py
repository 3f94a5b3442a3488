"""The memory of packed messages among CPU ranks, for interpreted kernels: as memory/cuda/packed_space.py on GPUs."""

from __future__ import annotations

import torch

from overweave.memory.board.board import Board
from overweave.memory.host.shared import share
from overweave.memory.packed_layout import HALVES


class HostPacked:
    """Collective. spaces: where each rank's lies in this process, int64 `[world_size]`. state: the calls so far."""

    def __init__(self, board: Board, half_bytes: int, timeout_s: float) -> None:
        self.half_bytes = half_bytes
        size_bytes = HALVES * half_bytes
        file = share(
            board.rank,
            board.world_size * size_bytes,
            lambda data: board.exchange(data, timeout_s),
            lambda file: None,
        )
        file.forget_name()
        self._memory = torch.frombuffer(file.memory, dtype=torch.uint8)
        start = self._memory.data_ptr()
        self.spaces = torch.tensor([start + rank * size_bytes for rank in range(board.world_size)])
        self.state = torch.zeros(1, dtype=torch.int64)
