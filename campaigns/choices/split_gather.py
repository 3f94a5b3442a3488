"""The other way to overlap: the same matmul cut into launches of one chunk each, each behind the copy of its chunk.

Chunks are pulled by the copy engine on a stream of its own, straight from the peer's shard: nothing is signalled, the
data is there before the first call. A call is captured, so that the host is not in its way.
SOURCE: AutoOverlap, Figure 2b, the kernel-partitioned baseline.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from campaigns.tables.compiled_layer import CONSTANTS, Layer
from campaigns.tables.compiled_variants import Tile
from examples.kernels.matmul import matmul_kernel
from overweave.memory.cuda import driver
from overweave.memory.cuda.heap import CudaHeap
from overweave.tuner.measure.trial import CheckedCall

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]  # rows, weight, where the product goes


def by_kernel(tile: Tile) -> Multiply:
    """The author's kernel as it stands in its file."""
    constants = {**tile.constants, **CONSTANTS, "GROUP_M": tile.group}
    del constants["tile_group"]

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        (m, k), n = a.shape, b.shape[1]
        programs = -(-m // tile.block_m) * -(-n // tile.block_n)
        matmul_kernel[(programs,)](a, b, out, m, n, k, k, 1, n, 1, n, 1, **constants)

    return multiply


def by_library(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b, out=out)


class SplitGather:
    """all_gather(x) @ w in `pieces` launches per shard. Collective."""

    def __init__(self, layer: Layer) -> None:
        self._layer, group = layer, layer.setting.group
        self._shard_bytes = layer.side.xs[0].nbytes
        self._heap = CudaHeap(group, layer.setting.device, layer.sets * self._shard_bytes)
        for index, x in enumerate(layer.side.xs):
            self._heap.view(index * self._shard_bytes, (x.shape[0], x.shape[1]), x.dtype).copy_(x)
        torch.cuda.synchronize()
        dist.barrier(group.process_group)  # nobody pulls what is not there
        self._gathered = torch.empty_like(layer.side.lefts[0])
        self._stream = torch.cuda.Stream(priority=-1)

    def call(self, pieces: int, multiply: Multiply) -> CheckedCall:
        """The rows of every shard must be pieces of equally many."""

        def run(turn: int) -> torch.Tensor:
            layer, main = self._layer, torch.cuda.current_stream()
            index = turn % layer.sets
            arrived = self._pull(index, pieces)
            for rank, piece, (lo, hi) in self._chunks(pieces):
                if (rank, piece) in arrived:
                    main.wait_event(arrived[rank, piece])
                a = self._gathered if rank != layer.setting.group.rank else layer.side.lefts[index]
                multiply(a[lo:hi], layer.side.rights[index], layer.out[lo:hi])
            main.wait_stream(self._stream)
            return layer.out

        return run

    def _chunks(self, pieces: int) -> list[tuple[int, int, tuple[int, int]]]:
        """(rank, piece, rows), the own ones first, then those of the next ranks."""
        group, (lo, hi) = self._layer.setting.group, self._layer.side.rows
        shard = hi - lo
        rows = shard // pieces
        ranks = [(group.rank + step) % group.world_size for step in range(group.world_size)]
        starts = [(rank, piece, rank * shard + piece * rows) for rank in ranks for piece in range(pieces)]
        return [(rank, piece, (low, low + rows)) for rank, piece, low in starts]

    def _pull(self, index: int, pieces: int) -> dict[tuple[int, int], torch.cuda.Event]:
        """Enqueues all copies; the event of each chunk that is a peer's."""
        self._stream.wait_stream(torch.cuda.current_stream())
        events: dict[tuple[int, int], torch.cuda.Event] = {}
        size = self._shard_bytes // pieces
        for rank, piece, (low, _) in self._chunks(pieces):
            if rank == self._layer.setting.group.rank:
                continue
            source = self._heap.addresses[rank] + index * self._shard_bytes + piece * size
            driver.copy(self._stream.cuda_stream, source, self._gathered[low:].data_ptr(), size, 1, (size, size))
            events[rank, piece] = torch.cuda.Event()
            events[rank, piece].record(self._stream)
        return events
