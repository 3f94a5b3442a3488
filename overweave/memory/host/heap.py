"""The symmetric heap of CPU ranks: one part per rank, all parts mapped by every rank of the group.

    part of a rank:  words | signals of slot 0 | signals of slot 1 | buffers of slot 0 | buffers of slot 1

words: the abort word, then one completed-calls word per peer, each on its own line (memory/device/signals.py).
Signals have an area of their own, so that those of the next call are zero whatever its layout is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overweave.memory.board.board import Board
from overweave.memory.host.shared import SharedFile, share
from overweave.memory.layout import SIGNAL_STRIDE_BYTES, SIGNAL_STRIDE_WORDS, SlotLayout, aligned

SLOTS = 2
ABORT, COMPLETED = 0, 1  # lines of the words


class HostHeap:
    """`part(...)` and `lines(...)` are views of any rank's part; a rank's stores there are seen by all."""

    def __init__(self, file: SharedFile, world_size: int, signals: int, slot_bytes: int) -> None:
        self.world_size = world_size
        self.signals = signals
        self.slot_bytes = slot_bytes
        self._signals_offset = (COMPLETED + world_size) * SIGNAL_STRIDE_BYTES
        self._slots_offset = aligned(self._signals_offset + SLOTS * signals * SIGNAL_STRIDE_BYTES)
        self._part_bytes = part_bytes(world_size, signals, slot_bytes)
        self._memory = torch.frombuffer(file.memory, dtype=torch.uint8)
        self._lines = file.memory[: file.size_bytes // 4 * 4].cast("i")

    @classmethod
    def create(cls, board: Board, signals: int, slot_bytes: int, deadline_s: float | None = None) -> HostHeap:
        """Collective. Raises MachineError on every rank if one cannot map it, PeerDied, PeerTimeout."""
        slot_bytes = aligned(slot_bytes)
        size_bytes = board.world_size * part_bytes(board.world_size, signals, slot_bytes)
        file = share(board.rank, size_bytes, lambda data: board.exchange(data, deadline_s), lambda file: None)
        file.forget_name()
        return cls(file, board.world_size, signals, slot_bytes)

    def holds(self, layout: SlotLayout) -> bool:
        """Whether calls of this layout fit."""
        return layout.signals <= self.signals and layout.size_bytes <= self.slot_bytes

    def tensor(self, rank: int, slot: int, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The matrix at a byte offset of a slot of `rank`'s part, as `SlotLayout.buffers` gives it."""
        start = rank * self._part_bytes + self._slots_offset + slot * self.slot_bytes + offset
        size_bytes = shape[0] * shape[1] * dtype.itemsize
        return self._memory[start : start + size_bytes].view(dtype).view(shape)

    def word_lines(self, rank: int) -> memoryview:
        """The abort word and the completed-calls words of `rank`, as int32, `SIGNAL_STRIDE_WORDS` to a line."""
        start = rank * self._part_bytes // 4
        return self._lines[start : start + (COMPLETED + self.world_size) * SIGNAL_STRIDE_WORDS]

    def signal_lines(self, rank: int, slot: int) -> memoryview:
        """The signals of one slot of `rank`, as int32, `SIGNAL_STRIDE_WORDS` to a signal."""
        words = self.signals * SIGNAL_STRIDE_WORDS
        start = (rank * self._part_bytes + self._signals_offset) // 4 + slot * words
        return self._lines[start : start + words]

    def signal_address(self, rank: int, slot: int, number: int) -> int:
        """Where a signal's line lies in this process."""
        offset = self._signals_offset + (slot * self.signals + number) * SIGNAL_STRIDE_BYTES
        return self._memory.data_ptr() + rank * self._part_bytes + offset

    def word_address(self, rank: int) -> int:
        """Where the words of `rank` lie in this process."""
        return self._memory.data_ptr() + rank * self._part_bytes


def part_bytes(world_size: int, signals: int, slot_bytes: int) -> int:
    """Bytes of one rank's part."""
    lines = COMPLETED + world_size + SLOTS * signals
    return aligned(lines * SIGNAL_STRIDE_BYTES) + SLOTS * slot_bytes
