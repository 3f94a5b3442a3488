"""Copies by a kernel on a few SMs alone (kernels/copy.py), with a claim counter for each call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overweave.ir.plan import CopyConfig
from overweave.ir.tile_order import TileRow
from overweave.kernels.arguments import LaunchTiles, SignalWords
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.kernel_calls.call import Moving, TileKernelArgs, table_tensor
from overweave.runtime.kernel_calls.sums_and_copies import Pushes, copy_call

WORD_BYTES = 16


class SmCopies:
    """Copies rows of `source`, int32, as the table says. zones: the address of each target, and of its signals."""

    def __init__(
        self,
        config: CopyConfig,
        source: torch.Tensor,
        row_bytes: int,
        table: tuple[TileRow, ...],
        zones: Sequence[tuple[int, int]],
        calls: int,
    ) -> None:
        """calls: how many counters there are; a call's number says which is its own."""
        device = source.device
        self._counters = torch.zeros(calls * WORD_BYTES, dtype=torch.uint8, device=device)
        words = torch.zeros(64, dtype=torch.int32, device=device)
        limits = torch.zeros(3 + len(zones), dtype=torch.int64, device=device)
        targets = torch.tensor([list(zone) for zone in zones], dtype=torch.int64, device=device)
        self._claims = Moving(self._counters.data_ptr(), torch.int32)
        queue = LaunchTiles(table_tensor(table, device), self._claims, limits, len(table))
        tiles = TileKernelArgs(queue, SignalWords(words, words, limits, len(zones) + 1))
        self._launch = Launch(copy_call(config, tiles, Pushes(targets, source, row_bytes // WORD_BYTES)))
        self._alive = words, limits, targets  # the launch holds their addresses

    def __call__(self, call: int) -> torch.Tensor:
        self._claims.address = self._counters.data_ptr() + call * WORD_BYTES
        self._launch.start(torch.cuda.current_stream().cuda_stream)
        return self._counters
